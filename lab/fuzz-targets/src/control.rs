//! The lines of the control sockets, that of a `godwitd` among them, as either end reads them, and
//! what is printed of them.

use godwit_control::asked::{Asked, VERSIONS};
use godwit_control::messages::{Answer, Request};
use godwit_control::steer::steer;
use godwit_daemon::messages as daemon;
use godwit_engine::destination::Notice;
use godwit_engine::handle::MigrationHandle;
use godwit_engine::report::Progress;
use godwit_terminal::progress::Table;
use godwit_terminal::{output, say};

/// Lines, each a request or an answer.
pub(crate) fn lines(bytes: &[u8]) {
    for line in bytes.split(|byte| *byte == b'\n') {
        if let Ok(request) = serde_json::from_slice::<Request>(line) {
            requested(&request);
        }
        if let Ok(asked) = Asked::read(line) {
            assert!(asked.version.is_none_or(|version| VERSIONS.contains(&version)));
            requested(&asked.request);
        }
        if let Ok(answer) = serde_json::from_slice::<Answer>(line) {
            answered(answer);
        }
        match daemon::Request::parse(line) {
            Ok(request) => {
                assert_eq!(daemon::Request::parse(request.line().as_bytes()), Ok(request));
            }
            // It is one line of a log.
            Err(why) => assert!(!say::line(why).contains(char::is_control)),
        }
        if let Ok(answer) = serde_json::from_slice::<daemon::Answer>(line) {
            serde_json::to_string(&answer).expect("an answer is JSON");
        }
    }
}

/// What a VMM does before it does anything. What was understood can be asked again.
fn requested(request: &Request) {
    let text = serde_json::to_string(request).expect("a request is JSON");
    assert_eq!(serde_json::from_str::<Request>(&text).ok().as_ref(), Some(request));
    match request {
        Request::Migrate(wish) => {
            let _ =
                (wish.disks(), MigrationHandle::typed(wish.settings.clone(), Default::default()));
            // Keys would be read, of this host.
            if wish.security.insecure && wish.security.keys.is_none() {
                let _ = wish.options();
            }
        }
        Request::Cancel => {}
        other => {
            let answer = steer(&MigrationHandle::default(), other);
            serde_json::to_string(&answer).expect("an answer is JSON");
        }
    }
}

/// What a command does with what a VMM has said.
fn answered(answer: Answer) {
    let shown = match answer {
        Answer::Progress(look) => of_progress(&look),
        Answer::Migration(look) => {
            let text = look.progress.map_or_else(String::new, |progress| of_progress(&progress));
            format!("{text}{:?}{:?}", look.vm, look.settings)
        }
        Answer::Migrated { measures, cost } => {
            output::measures_text(&measures, cost.cpu_ms, cost.peak_rss_bytes, 80)
        }
        Answer::Notice(line) => match Notice::from(line) {
            Notice::Refused(why) => say::line(why),
            notice => format!("{notice:?}"),
        },
        answer @ Answer::Failed { .. } => answer.failure().map_or_else(String::new, say::line),
        other => format!("{other:?}"),
    };
    let plain = say::plain(&shown);
    assert!(!plain.chars().any(|c| c.is_control() && c != '\n' && c != '\t'));
}

fn of_progress(progress: &Progress) -> String {
    let mut text = output::status_text(progress, 80);
    for width in [20, 79, 160] {
        let table = Table::new(width, !progress.disks.is_empty());
        text += &table.head();
        text += &table.row(progress);
    }
    text
}
