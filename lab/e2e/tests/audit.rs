//! Audits by the command: of a move in which a page is placed wrongly on purpose, what is said of
//! the page, and what the trace says of where that came from and when; and of one in which nothing
//! is wrong.

use std::path::PathBuf;

use anyhow::{Context, ensure};
use godwit_e2e::{LIMIT, Pair, check_moved, check_untouched};
use godwit_stamp::settings::Mode;
use godwit_testbed::{GuestConfig, TestVm, VmConfig, builds_for, builds_in_turn_for};

/// What godwit says when a defect has struck; the last round may bring no page that it could.
const STRUCK: &str = "made up: the defect has struck";
const TRIES: u32 = 10;

/// The file of a trace, which goes with its value.
struct Trace(PathBuf);

/// A version of a page that was sent: where it belongs, and of which round and by which channel.
#[derive(Debug, PartialEq)]
struct Sent {
    block: String,
    offset: u64,
    round: u64,
    channel: u64,
    milliseconds: u64,
    fingerprint: String,
    what: String,
}

impl Trace {
    fn new(name: &str) -> Self {
        Self(std::env::temp_dir().join(format!("godwit-trace-{name}-{}", std::process::id())))
    }

    fn name(&self) -> String {
        self.0.to_string_lossy().into_owned()
    }

    /// The versions of one page, in the order in which they were sent.
    fn versions(&self, block: &str, offset: u64) -> anyhow::Result<Vec<Sent>> {
        let text = std::fs::read_to_string(&self.0).context("no trace")?;
        let mut lines = text.lines();
        let names = "# block\toffset\tround\tchannel\tframe\tmilliseconds\tfingerprint\twhat";
        ensure!(lines.next() == Some(names), "no names of columns");
        let all: Vec<Sent> = lines.map(sent).collect::<Result<_, _>>()?;
        Ok(all.into_iter().filter(|it| it.block == block && it.offset == offset).collect())
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn hex(text: &str) -> anyhow::Result<u64> {
    let digits = text.strip_prefix("0x").context("no offset")?;
    Ok(u64::from_str_radix(digits, 16)?)
}

/// A line of the trace.
fn sent(line: &str) -> anyhow::Result<Sent> {
    let columns: Vec<&str> = line.split('\t').collect();
    let [block, offset, round, channel, _, milliseconds, fingerprint, what] = columns[..] else {
        anyhow::bail!("{} columns: {line}", columns.len());
    };
    Ok(Sent {
        block: block.to_owned(),
        offset: hex(offset)?,
        round: round.parse()?,
        channel: channel.parse()?,
        milliseconds: milliseconds.parse()?,
        fingerprint: fingerprint.to_owned(),
        what: what.to_owned(),
    })
}

/// What stands in `text` between `before` and `after`.
fn between<'a>(text: &'a str, before: &str, after: &str) -> anyhow::Result<&'a str> {
    let (_, rest) = text.split_once(before).with_context(|| format!("no {before:?} in {text}"))?;
    let (found, _) = rest.split_once(after).with_context(|| format!("no {after:?} in {text}"))?;
    Ok(found)
}

#[test]
fn the_trace_of_an_audit_says_where_the_page_that_differs_came_from_and_when() -> anyhow::Result<()>
{
    for build in builds_in_turn_for("audit") {
        let config = VmConfig::new(&build, GuestConfig::small(Mode::Rate));
        let mut pair = Pair::start(&config)?;
        let trace = Trace::new("differs");
        let mut tries = 0..TRIES;
        let said = loop {
            tries.next().context("the defect found nothing to strike")?;
            let late = ["--defect", "late-old-page"];
            let (mut receive, address) = pair.godwit.receive(&pair.destination, &late)?;
            let audit = ["--audit", "--trace", &trace.name()];
            let migrate = pair.godwit.migrate(&pair.source, &address, &audit)?.wait(LIMIT)?;
            receive.kill();
            if receive.errors().contains(STRUCK) {
                ensure!(!migrate.status.success(), "{}", migrate.last());
                break migrate.errors;
            }
            pair.move_on(TestVm::destination(&config)?);
        };
        let block = between(&said, "RAM block '", "'")?;
        let offset = hex(between(&said, "' at ", " holds the version of round")?)?;
        let held: u64 = between(&said, "holds the version of round ", ",")?.parse()?;
        let round: u64 = between(&said, "was sent in round ", " over channel ")?.parse()?;
        let channel: u64 = between(&said, " over channel ", ":")?.parse()?;
        let versions = trace.versions(block, offset)?;
        let last = versions.last().context("the trace does not know the page")?;
        ensure!((last.round, last.channel) == (round, channel), "{said}{versions:?}");
        ensure!(last.what == "data", "{last:?}");
        // What is there came earlier, and was other content.
        let old = versions.iter().rev().find(|it| it.round == held).context("no such round")?;
        ensure!(old.round < last.round && old.milliseconds <= last.milliseconds, "{versions:?}");
        ensure!(old.fingerprint != last.fingerprint, "{versions:?}");
        let ordered = |two: &[Sent]| two[0].milliseconds <= two[1].milliseconds;
        ensure!(versions.windows(2).all(ordered), "{versions:?}");
        check_untouched(&mut pair.source)?;
    }
    Ok(())
}

#[test]
fn godwit_audit_moves_a_guest_of_which_nothing_differs_and_says_so() -> anyhow::Result<()> {
    let Some(build) = builds_for("audit").pop() else { return Ok(()) };
    let mut pair = Pair::start(&VmConfig::new(&build, GuestConfig::small(Mode::Rate)))?;
    let trace = Trace::new("equal");
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let audit = pair.godwit.audit(&pair.source, &address, &["--trace", &trace.name()])?;
    let audit = audit.wait(LIMIT)?;
    receive.wait(LIMIT)?;
    check_moved(&mut pair, &audit)?;
    let said = &audit.last()["audit"];
    ensure!(said["compared_pages"].as_u64() > Some(0), "{}", audit.last());
    for question in ["memory", "sent", "order"] {
        ensure!(said[question]["differing_pages"] == 0, "{question}: {said}");
    }
    ensure!(said["disks"].is_null(), "{said}");
    let lines = std::fs::read_to_string(&trace.0)?.lines().count();
    ensure!(lines > 1, "a trace of {lines} lines");
    Ok(())
}
