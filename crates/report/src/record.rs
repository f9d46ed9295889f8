//! What was seen of one migration.
//!
//! Invariant: a record has at most 600 looks that are not the end of a round, whatever it
//! took; what goes are looks between others, never the last one of a round or of an outage.

use std::io::BufRead;

use godwit_engine::report::{Measures, Progress};
use godwit_units::ByteCount;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Looks that are kept.
const LOOKS: usize = 600;
/// The longest line that is read: measures of 10,000 rounds are shorter.
const LINE_LIMIT: u64 = 8 << 20;

/// Who moved where, and when.
///
/// ```
/// use godwit_report::Head;
///
/// let head = Head { vm: "web01".into(), to: "east:7000".into(), ..Head::default() };
/// assert!(head.began_ms.is_none());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Head {
    /// What an operator calls the VM.
    pub vm: String,
    /// Where it went.
    pub to: String,
    /// The host that the record is of: the one that it left, or that took it in.
    pub host: String,
    /// The godwit that moved it.
    pub version: String,
    /// Milliseconds since 1970 (UTC) at the start.
    pub began_ms: Option<u64>,
}

/// How it ended.
#[derive(Clone, Debug)]
pub enum Ending {
    /// The guest runs at the destination, or in another QEMU of the same host.
    Moved(Box<Moved>),
    /// It does not.
    Failed {
        /// In a word: `failed`, `cancelled`, `in-doubt`, `refused`.
        outcome: String,
        /// Why.
        error: String,
        /// Where the guest is.
        guest: String,
    },
    /// The record ends before the migration does.
    Unfinished,
}

/// What is known of a migration that came to a good end.
#[derive(Clone, Debug, Default)]
pub struct Moved {
    /// Its measures.
    pub measures: Measures,
    /// Processor time that this side took, if that was measured.
    pub cpu_ms: Option<f64>,
    /// The most memory that it had.
    pub peak_rss_bytes: Option<u64>,
    /// What became of its QEMU, where it only changed that.
    pub upgrade: Option<Upgrade>,
}

/// What `godwit upgrade` tells of a guest whose QEMU was changed.
///
/// ```
/// let none = godwit_report::Upgrade::default();
/// assert!(none.version.is_none() && none.remarks.is_empty());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Upgrade {
    /// What became of its memory: `in-place`, or `copied`.
    pub memory: String,
    /// The process of the new QEMU.
    pub pid: Option<i64>,
    /// Its version.
    pub version: Option<String>,
    /// The process of the old QEMU.
    pub old_pid: Option<i64>,
    /// Its version.
    pub old_version: Option<String>,
    /// What is not as it should be.
    pub remarks: Vec<String>,
}

/// What was seen of one migration.
#[derive(Clone, Debug)]
pub struct Record {
    /// Who moved where.
    pub head: Head,
    /// What progress was seen, in its order.
    pub looks: Vec<Progress>,
    /// How it ended.
    pub ending: Ending,
}

/// Why something is no record.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// It cannot be read.
    #[error("cannot be read: {0}")]
    Read(#[from] std::io::Error),
    /// A line is not what it should be.
    #[error("line {line} is no line of a record, nor of --json: {why}")]
    Line {
        /// Which one, from 1.
        line: usize,
        /// What is wrong with it.
        why: String,
    },
    /// It is something else.
    #[error(
        "is JSON, but nothing that has a page: show a record or what `godwit migrate --json` or \
         `godwit simulate --json` printed, or a benchmark's or soak's file of target/bench"
    )]
    Other,
    /// It is more than any of them can be.
    #[error("is larger than {0}: that is none of godwit's files")]
    Large(ByteCount),
    /// There is nothing to show.
    #[error("there is no progress and no outcome in it: is it what --json printed?")]
    Empty,
}

/// Hands on what each line holds that is not empty; where that is no JSON, or `take` finds it
/// wrong, the line is named.
pub(crate) fn each_value(
    mut lines: impl BufRead,
    mut take: impl FnMut(Value) -> serde_json::Result<()>,
) -> Result<(), RecordError> {
    let mut text = String::new();
    for line in 1.. {
        text.clear();
        if std::io::Read::take(&mut lines, LINE_LIMIT).read_line(&mut text)? == 0 {
            break;
        }
        if text.trim().is_empty() {
            continue;
        }
        serde_json::from_str(&text)
            .and_then(&mut take)
            .map_err(|error| RecordError::Line { line, why: error.to_string() })?;
    }
    Ok(())
}

impl Record {
    /// Reads one: a record, or what `--json` printed. Events that are neither progress nor an
    /// outcome are passed by.
    ///
    /// # Errors
    /// The first line that is not JSON, or progress that is none.
    ///
    /// ```
    /// use godwit_report::{Ending, Record};
    ///
    /// let lines = r#"{"event":"record","vm":"web01","to":"east:7000"}
    /// {"outcome":"failed","error":"the link broke","guest":"source"}"#;
    /// let record = Record::read(lines.as_bytes())?;
    /// assert_eq!(record.head.vm, "web01");
    /// assert!(matches!(record.ending, Ending::Failed { .. }));
    /// # Ok::<(), godwit_report::RecordError>(())
    /// ```
    pub fn read(lines: impl BufRead) -> Result<Self, RecordError> {
        let (mut head, mut looks, mut ending) = (Head::default(), Vec::new(), None);
        each_value(lines, |value| {
            match value["event"].as_str() {
                Some("record") => head = serde_json::from_value(value)?,
                Some("progress") => looks.push(serde_json::from_value(value)?),
                Some(_) => {}
                None if value["outcome"].is_string() => ending = Some(Ending::of(value)?),
                None => {}
            }
            Ok(())
        })?;
        if looks.is_empty() && ending.is_none() {
            return Err(RecordError::Empty);
        }
        Ok(Self { head, looks, ending: ending.unwrap_or(Ending::Unfinished) })
    }
}

impl Ending {
    fn of(value: Value) -> serde_json::Result<Self> {
        let word = |name: &str| value[name].as_str().unwrap_or_default().to_owned();
        let outcome = word("outcome");
        let upgrade = match outcome.as_str() {
            "migrated" => None,
            "upgraded" => Some(serde_json::from_value(value.clone())?),
            _ => return Ok(Self::Failed { outcome, error: word("error"), guest: word("guest") }),
        };
        let (cpu_ms, peak_rss_bytes) = (value["cpu_ms"].as_f64(), value["peak_rss_bytes"].as_u64());
        let measures = serde_json::from_value(value)?;
        Ok(Self::Moved(Box::new(Moved { measures, cpu_ms, peak_rss_bytes, upgrade })))
    }
}

/// Sees a migration, and makes the record of it.
#[derive(Debug)]
pub struct Recorder {
    head: Head,
    looks: Vec<Progress>,
    /// The last look, where it was not kept yet.
    pending: Option<Progress>,
    /// Of so many looks one is kept.
    stride: u64,
    seen: u64,
}

impl Recorder {
    /// For what `head` tells.
    #[must_use]
    pub fn new(head: Head) -> Self {
        Self { head, looks: Vec::new(), pending: None, stride: 1, seen: 0 }
    }

    /// Another look.
    pub fn see(&mut self, progress: &Progress) {
        let before = self.pending.as_ref().or(self.looks.last());
        let turns = before.is_some_and(|before| is_turn(before, progress));
        let before = self.pending.take();
        self.looks.extend(before.filter(|_| turns));
        self.seen += 1;
        if progress.round_ended || turns || self.seen.is_multiple_of(self.stride) {
            self.looks.push(progress.clone());
        } else {
            self.pending = Some(progress.clone());
        }
        if self.looks.iter().filter(|look| !look.round_ended).count() > LOOKS {
            thin(&mut self.looks);
            self.stride *= 2;
        }
    }

    /// The lines of the record, of which `last` is the last one: what `--json` prints in the end.
    #[must_use]
    pub fn lines(&self, last: &Value) -> String {
        let mut lines = String::new();
        let head = with_event("record", serde_json::to_value(&self.head));
        let looks = self.looks.iter().chain(&self.pending);
        let looks = looks.map(|look| with_event("progress", serde_json::to_value(look)));
        for line in std::iter::once(head).chain(looks).chain(std::iter::once(last.clone())) {
            lines += &line.to_string();
            lines.push('\n');
        }
        lines
    }
}

/// `value` as an event.
pub(crate) fn with_event(event: &str, value: serde_json::Result<Value>) -> Value {
    let mut whole = json!({ "event": event });
    if let (Value::Object(whole), Ok(Value::Object(value))) = (&mut whole, value) {
        whole.extend(value);
    }
    whole
}

/// Whether something begins or ends between two looks.
fn is_turn(one: &Progress, next: &Progress) -> bool {
    next.severed.is_some() != one.severed.is_some() || next.stage != one.stage
}

/// Leaves out every second look of those that another look can stand for.
fn thin(looks: &mut Vec<Progress>) {
    let mut kept = Vec::with_capacity(looks.len());
    let mut odd = false;
    for (at, look) in looks.iter().enumerate() {
        let turns = looks.get(at + 1).is_none_or(|next| is_turn(look, next))
            || at.checked_sub(1).is_some_and(|before| is_turn(&looks[before], look));
        if look.round_ended || turns {
            kept.push(look.clone());
            continue;
        }
        if odd {
            kept.push(look.clone());
        }
        odd = !odd;
    }
    *looks = kept;
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A look `at` ms, at the end of `round` if so.
    pub(crate) fn look(at: u64, round: u32, round_ended: bool) -> Progress {
        serde_json::from_value(json!({
            "elapsed_ms": at, "stage": "pre-copy", "round": round, "round_ended": round_ended,
            "sent_bytes": at * 1000, "remaining_bytes": 5, "dirty_bytes_per_second": null,
            "bandwidth_bytes_per_second": 1e9, "expected_downtime_ms": null,
            "remaining_time": null, "throttle": 0.25, "guest_speed": null,
            "delayed_segments": 0, "disk_limit_bytes_per_second": null, "advice": null,
            "warning": null,
        }))
        .unwrap()
    }

    #[test]
    fn what_is_written_is_read() {
        let head = Head { vm: "web01".into(), began_ms: Some(7), ..Head::default() };
        let mut recorder = Recorder::new(head.clone());
        let looks: Vec<Progress> = (0..20).map(|at| look(at, 0, at == 19)).collect();
        looks.iter().for_each(|look| recorder.see(look));
        let measures = Measures { rounds: 3, ..Measures::default() };
        let mut last = serde_json::to_value(measures).unwrap();
        last["outcome"] = "migrated".into();
        last["cpu_ms"] = 12.5.into();
        let record = Record::read(recorder.lines(&last).as_bytes()).unwrap();
        assert_eq!((record.head, record.looks), (head, looks));
        let Ending::Moved(moved) = record.ending else { panic!("{:?}", record.ending) };
        assert_eq!(
            (moved.measures.rounds, moved.cpu_ms, moved.peak_rss_bytes),
            (3, Some(12.5), None)
        );
    }

    #[test]
    fn an_upgrade_is_no_failure() {
        // Regression: only migrations were known to end well.
        let measures = Measures { rounds: 3, ..Measures::default() };
        let mut last = serde_json::to_value(measures).unwrap();
        let own = json!({ "outcome": "upgraded", "memory": "copied", "pid": 17,
            "version": "10.0.2", "old_pid": 16, "old_version": "7.2.22", "remarks": ["slow"] });
        last.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
        let record = Record::read(last.to_string().as_bytes()).unwrap();
        let Ending::Moved(moved) = record.ending else { panic!("{:?}", record.ending) };
        let upgrade = moved.upgrade.unwrap();
        assert_eq!((moved.measures.rounds, upgrade.memory.as_str()), (3, "copied"));
        assert_eq!((upgrade.pid, upgrade.old_version.as_deref()), (Some(17), Some("7.2.22")));
        let failed = r#"{"outcome":"failed","error":"it does not load","guest":"source"}"#;
        let record = Record::read(failed.as_bytes()).unwrap();
        assert!(matches!(record.ending, Ending::Failed { .. }));
    }

    #[test]
    fn a_long_migration_keeps_its_ends_of_rounds_and_few_looks_between() {
        // Mutation: ends of rounds go as others do, or nothing does.
        let mut recorder = Recorder::new(Head::default());
        for at in 0..100_000 {
            recorder.see(&look(at, (at / 500) as u32, at % 500 == 499));
        }
        let ends = recorder.looks.iter().filter(|look| look.round_ended).count();
        assert_eq!(ends, 200);
        assert!((LOOKS / 3..=LOOKS).contains(&(recorder.looks.len() - ends)));
        assert!(recorder.looks.is_sorted_by_key(|look| look.elapsed));
        let gap = recorder.looks.windows(2).map(|two| two[1].elapsed - two[0].elapsed).max();
        assert!(gap.unwrap().as_millis() < 1000, "{gap:?}");
    }

    #[test]
    fn what_is_no_record_is_told_with_its_line() {
        let wrong = |text: &str| Record::read(text.as_bytes()).unwrap_err().to_string();
        assert!(wrong("").contains("no progress and no outcome"));
        assert!(wrong("{}\nnothing\n").starts_with("line 2 is no line of a record"));
        assert!(wrong("{\"event\":\"progress\"}").starts_with("line 1"));
        let unfinished = Record::read("{\"event\":\"x\"}\n".as_bytes());
        assert!(unfinished.is_err());
        let text = with_event("progress", serde_json::to_value(look(1, 0, true))).to_string();
        let record = Record::read(text.as_bytes()).unwrap();
        assert!(matches!(record.ending, Ending::Unfinished) && record.looks.len() == 1);
    }
}
