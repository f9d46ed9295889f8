//! A migration as spans, for tracing systems: what took from when to when, each within another.
//!
//! Times are those of the source, from the start of the migration on. What a record tells of by its
//! length alone (the parts of the downtime) is laid out in the order in which it happens.

use std::time::Duration;

use godwit_engine::report::{DowntimeParts, Measures, Progress};

use crate::{Ending, Record};

/// Something that took time.
///
/// ```
/// use godwit_report::{Record, spans};
///
/// let lines = r#"{"event":"record","vm":"web01","to":"east:7000"}
/// {"outcome":"failed","error":"the link broke","guest":"source"}"#;
/// let spans = spans(&Record::read(lines.as_bytes())?);
/// assert_eq!((spans[0].name.as_str(), spans[0].parent), ("migrate", None));
/// assert_eq!(spans[0].error.as_deref(), Some("the link broke"));
/// # Ok::<(), godwit_report::RecordError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// What it is called.
    pub name: String,
    /// The span that it is within, by its number among all; always an earlier one.
    pub parent: Option<usize>,
    /// From when on.
    pub start: Duration,
    /// Until when.
    pub end: Duration,
    /// What else is known of it; sizes in bytes, times in milliseconds.
    pub attributes: Vec<(&'static str, Attribute)>,
    /// Why it came to no good end.
    pub error: Option<String>,
}

/// What is known of a span.
#[derive(Clone, Debug, PartialEq)]
pub enum Attribute {
    /// Words.
    Text(String),
    /// A count.
    Count(u64),
    /// Another number.
    Number(f64),
}

/// The migration as spans; the first one is all of it.
#[must_use]
pub fn spans(record: &Record) -> Vec<Span> {
    let head = &record.head;
    let seen = record.looks.last().map(|look| look.elapsed).unwrap_or_default();
    let mut all = Span::new("migrate", None, Duration::ZERO..seen);
    all.tell("godwit.vm", Attribute::Text(head.vm.clone()));
    all.tell("godwit.to", Attribute::Text(head.to.clone()));
    let measures = match &record.ending {
        Ending::Moved(moved) => {
            let outcome = if moved.upgrade.is_some() { "upgraded" } else { "migrated" };
            all.tell("godwit.outcome", Attribute::Text(outcome.to_owned()));
            all.end = moved.measures.total.max(seen);
            tell_measures(&mut all, &moved.measures);
            Some(&moved.measures)
        }
        Ending::Failed { outcome, error, guest } => {
            all.tell("godwit.outcome", Attribute::Text(outcome.clone()));
            all.tell("godwit.guest", Attribute::Text(guest.clone()));
            all.error = Some(error.clone());
            None
        }
        Ending::Unfinished => None,
    };
    let mut spans = vec![all];
    if let Some(measures) = measures {
        spans.push(Span::new("set-up", Some(0), Duration::ZERO..measures.setup));
    }
    add_rounds(&mut spans, &record.looks, measures);
    add_outages(&mut spans, &record.looks);
    if let Some(measures) = measures {
        add_switchover(&mut spans, measures);
    }
    spans
}

impl Span {
    fn new(
        name: impl Into<String>,
        parent: Option<usize>,
        time: std::ops::Range<Duration>,
    ) -> Self {
        let (start, end) = (time.start, time.end.max(time.start));
        Self { name: name.into(), parent, start, end, attributes: Vec::new(), error: None }
    }

    fn tell(&mut self, name: &'static str, value: Attribute) {
        self.attributes.push((name, value));
    }
}

fn milliseconds(time: Duration) -> Attribute {
    Attribute::Number(time.as_secs_f64() * 1e3)
}

fn tell_measures(span: &mut Span, measures: &Measures) {
    span.tell("godwit.downtime_ms", milliseconds(measures.downtime));
    span.tell("godwit.sent_bytes", Attribute::Count(measures.sent.0));
    span.tell("godwit.ram_bytes", Attribute::Count(measures.ram.0));
    span.tell("godwit.device_state_bytes", Attribute::Count(measures.device_state.0));
    span.tell("godwit.rounds", Attribute::Count(measures.rounds as u64));
    span.tell("godwit.throttled_ms", milliseconds(measures.throttled));
}

/// A round that was seen to end, each: how long one took is known of those of a migration that came
/// to a good end, and else reckoned from the end of the one before.
fn add_rounds(spans: &mut Vec<Span>, looks: &[Progress], measures: Option<&Measures>) {
    let mut before = measures.map(|measures| measures.setup).unwrap_or_default();
    for look in looks.iter().filter(|look| look.round_ended) {
        let rounds = measures.map(|measures| measures.round_list.as_slice()).unwrap_or_default();
        let round = rounds.iter().find(|round| round.round == look.round);
        let start = match round {
            Some(round) => look.elapsed.saturating_sub(round.time).max(before),
            None => before,
        };
        let mut span = Span::new(format!("round {}", look.round), Some(0), start..look.elapsed);
        if let Some(round) = round {
            span.tell("godwit.sent_bytes", Attribute::Count(round.sent.0));
            span.tell("godwit.data_pages", Attribute::Count(round.data.0));
            span.tell("godwit.zero_pages", Attribute::Count(round.zero.0));
            span.tell("godwit.remaining_pages", Attribute::Count(round.remaining.0));
            span.tell("godwit.throttle", Attribute::Number(round.throttle));
        }
        before = look.elapsed;
        spans.push(span);
    }
}

/// Times in which the connections were lost.
fn add_outages(spans: &mut Vec<Span>, looks: &[Progress]) {
    let mut at = 0;
    while let Some(first) = looks[at..].iter().position(|look| look.severed.is_some()) {
        let first = at + first;
        let Some(severed) = &looks[first].severed else { return };
        let start = looks[first].elapsed.saturating_sub(severed.since);
        let over = looks[first..].iter().position(|look| look.severed.is_none());
        at = over.map_or(looks.len(), |over| first + over);
        let end = looks.get(at).or(looks.last()).map(|look| look.elapsed).unwrap_or_default();
        let mut span = Span::new("severed", Some(0), start..end);
        span.tell("godwit.why", Attribute::Text(severed.why.clone()));
        spans.push(span);
    }
}

/// The downtime with its parts, and what followed it.
fn add_switchover(spans: &mut Vec<Span>, measures: &Measures) {
    let after = measures.post_copy.map(|it| it.time).unwrap_or_default();
    let runs = measures.total.saturating_sub(after);
    let stopped = runs.saturating_sub(measures.downtime);
    let downtime = spans.len();
    spans.push(Span::new("downtime", Some(0), stopped..runs));
    let DowntimeParts { drain, copy, verify, safe, save, load, handover } = measures.parts;
    let parts = [
        ("drain devices", drain),
        ("last round", copy),
        ("compare digests", verify),
        ("copy to a third place", safe),
        ("save device state", save),
        ("load device state", load),
        ("hand over", handover),
    ];
    let mut at = stopped;
    for (name, time) in parts.into_iter().filter(|(_, time)| !time.is_zero()) {
        let end = (at + time).min(runs);
        spans.push(Span::new(name, Some(downtime), at..end));
        at = end;
    }
    if let Some(post_copy) = measures.post_copy {
        let mut span = Span::new("memory follows", Some(0), runs..measures.total);
        span.tell("godwit.missing_bytes", Attribute::Count(post_copy.missing.0));
        span.tell("godwit.asked_pages", Attribute::Count(post_copy.asked));
        span.tell("godwit.sent_bytes", Attribute::Count(post_copy.sent.0));
        spans.push(span);
    }
}

#[cfg(test)]
mod tests {
    use godwit_engine::report::{PostCopyMeasures, RoundMeasures, Severed};
    use godwit_units::ByteCount;

    use super::*;
    use crate::{Head, Moved};

    const fn ms(time: u64) -> Duration {
        Duration::from_millis(time)
    }

    fn look(at: u64, round: u32, round_ended: bool, severed: bool) -> Progress {
        let cut = Severed { since: ms(5), left: ms(1000), attempts: 1, why: "cut".to_owned() };
        let severed = severed.then_some(cut);
        Progress { severed, ..crate::record::tests::look(at, round, round_ended) }
    }

    fn times(spans: &[Span]) -> Vec<(&str, Option<usize>, u128, u128)> {
        let of = |span: &Span| (span.start.as_millis(), span.end.as_millis());
        spans.iter().map(|it| (it.name.as_str(), it.parent, of(it).0, of(it).1)).collect()
    }

    #[test]
    fn a_move_is_its_set_up_its_rounds_and_its_downtime() {
        // Mutations: a round begins at the end of the one before whatever it took; the parts of the
        // downtime begin at its end.
        let round = |round, time| RoundMeasures { round, time, ..RoundMeasures::default() };
        let measures = Measures {
            setup: ms(100),
            total: ms(1000),
            downtime: ms(50),
            parts: DowntimeParts {
                copy: ms(20),
                load: ms(25),
                handover: ms(10),
                ..DowntimeParts::default()
            },
            round_list: vec![round(0, ms(500)), round(1, ms(90))],
            post_copy: Some(PostCopyMeasures { time: ms(200), ..PostCopyMeasures::default() }),
            sent: ByteCount(7),
            ..Measures::default()
        };
        let record = Record {
            head: Head { vm: "web01".to_owned(), ..Head::default() },
            looks: vec![
                look(300, 0, false, false),
                look(600, 0, true, false),
                look(650, 1, false, true),
                look(660, 1, false, true),
                look(670, 1, false, false),
                look(750, 1, true, false),
            ],
            ending: Ending::Moved(Box::new(Moved { measures, ..Moved::default() })),
        };
        let spans = spans(&record);
        let expected = [
            ("migrate", None, 0, 1000),
            ("set-up", Some(0), 0, 100),
            ("round 0", Some(0), 100, 600),
            ("round 1", Some(0), 660, 750),
            ("severed", Some(0), 645, 670),
            ("downtime", Some(0), 750, 800),
            ("last round", Some(5), 750, 770),
            ("load device state", Some(5), 770, 795),
            // No longer than the whole.
            ("hand over", Some(5), 795, 800),
            ("memory follows", Some(0), 800, 1000),
        ];
        assert_eq!(times(&spans), expected);
        assert!(spans[0].attributes.contains(&("godwit.sent_bytes", Attribute::Count(7))));
        assert_eq!(spans[0].error, None);
    }

    #[test]
    fn one_that_failed_says_why_and_ends_when_it_was_last_seen() {
        let record = Record {
            head: Head::default(),
            looks: vec![look(400, 0, true, false), look(450, 1, false, true)],
            ending: Ending::Failed {
                outcome: "failed".to_owned(),
                error: "the link broke".to_owned(),
                guest: "source".to_owned(),
            },
        };
        let spans = spans(&record);
        let expected = [
            ("migrate", None, 0, 450),
            ("round 0", Some(0), 0, 400),
            ("severed", Some(0), 445, 450),
        ];
        assert_eq!(times(&spans), expected);
        assert_eq!(spans[0].error.as_deref(), Some("the link broke"));
    }
}
