//! What is found on the host that the tests run on, by real attempts: this program becomes the
//! process on which things are tried.
#![allow(clippy::unwrap_used)]

use std::io;
use std::path::Path;

use godwit_doctor::{COMMAND, Finding, Subject, Verdict, host, stand};

fn main() {
    if std::env::args().nth(1).as_deref() == Some(COMMAND) {
        stand(io::stdin().lock(), io::stdout()).unwrap();
        return;
    }
    println!("the capabilities of this kernel are found by use");
    what_the_kernel_can_is_found_by_use();
    println!("a program that is no subject is told of");
    a_program_that_is_no_subject_is_told_of();
    println!("keys are read as a migration reads them");
    keys_are_read_as_a_migration_reads_them();
    println!("a subject that is asked for what it cannot do has ended");
    a_subject_that_has_ended_does_not_keep_anybody_waiting();
}

fn own() -> std::path::PathBuf {
    std::env::current_exe().unwrap()
}

fn find<'a>(findings: &'a [Finding], what: &str) -> &'a Finding {
    let found = findings.iter().find(|finding| finding.what == what);
    found.unwrap_or_else(|| panic!("nothing is said of {what}: {findings:?}"))
}

fn what_the_kernel_can_is_found_by_use() {
    let findings = host(&own(), Path::new("/nonexistent/keys"));
    for what in ["kernel", "memory access", "page tables"] {
        assert_eq!(find(&findings, what).verdict, Verdict::Good, "{findings:?}");
    }
    let tracked = &find(&findings, "page tables").text;
    assert!(tracked.contains("all and no others"), "{tracked}");
    let keys = find(&findings, "encryption");
    assert!(keys.verdict == Verdict::Note && keys.cure.is_some(), "{keys:?}");
    for what in ["governor", "rights", "KVM", "run directory", "memory", "huge pages", "clock"] {
        let Finding { verdict, text, .. } = find(&findings, what);
        println!("  {}: {what}: {text}", verdict.word());
    }
}

fn a_program_that_is_no_subject_is_told_of() {
    for program in ["/bin/true", "/nonexistent"] {
        let findings = host(Path::new(program), Path::new("/nonexistent/keys"));
        let tables = find(&findings, "page tables");
        assert!(tables.verdict == Verdict::Bad && tables.text.contains(program), "{tables:?}");
        assert!(findings.iter().all(|finding| finding.what != "memory access"), "{findings:?}");
    }
}

fn keys_are_read_as_a_migration_reads_them() {
    use std::os::unix::fs::PermissionsExt;
    let dir = std::env::temp_dir().join(format!("godwit-doctor-{}", std::process::id()));
    let made = godwit_tls::make(&dir, &["west".to_owned()], 30).unwrap();
    let home = &made.hosts[0];
    let encryption = || find(&host(&own(), home), "encryption").clone();
    assert_eq!(encryption().verdict, Verdict::Good);
    let key = home.join("host-key.pem");
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o644)).unwrap();
    let exposed = encryption();
    assert!(
        exposed.verdict == Verdict::Bad && exposed.text.contains("host-key.pem"),
        "{exposed:?}"
    );
    std::fs::remove_dir_all(&dir).unwrap();
}

fn a_subject_that_has_ended_does_not_keep_anybody_waiting() {
    let mut subject = Subject::start(&own()).unwrap();
    subject.write(1).unwrap();
    let pid = rustix::process::Pid::from_raw(subject.pid()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    let begun = std::time::Instant::now();
    assert!((0..100).any(|page| subject.write(page).is_err()));
    println!("  found out after {:?}", begun.elapsed());
}
