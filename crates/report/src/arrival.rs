//! What a destination has seen of one migration: less than the source, and of its own side.
//!
//! Invariant: a record has at most a thousand events; what goes are those in the middle.

use std::fmt::Write;
use std::io::BufRead;
use std::time::Duration;

use godwit_units::{ByteCount, format_duration};
use serde::Deserialize;
use serde_json::Value;

use crate::html::{document, escaped};
use crate::page::{cards_of, subtitle};
use crate::record::{Head, RecordError, each_value, with_event};

/// Events that are kept.
const EVENTS: usize = 1000;
/// So many of the first rounds have a row, and as many of the last.
const ROWS: usize = 100;

/// What a destination has seen.
///
/// ```
/// use godwit_report::{Arrival, ArrivalEnding};
///
/// let lines = r#"{"event":"record","side":"destination","vm":"web01"}
/// {"event":"round","round":0,"received_bytes":4096,"at_ms":12.0}
/// {"outcome":"running","received_bytes":4096,"total_ms":20.0,"load_ms":3.0}"#;
/// let arrival = Arrival::read(lines.as_bytes())?;
/// assert_eq!((arrival.head.vm.as_str(), arrival.rounds[0].round), ("web01", 0));
/// assert!(matches!(arrival.ending, ArrivalEnding::Came(_)));
/// # Ok::<(), godwit_report::RecordError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Arrival {
    /// Who came where.
    pub head: Head,
    /// What was to come, if a source was accepted.
    pub offered: Option<Offered>,
    /// Rounds that were in place.
    pub rounds: Vec<Round>,
    /// When connections were lost, and came back.
    pub outages: Vec<Outage>,
    /// How it ended.
    pub ending: ArrivalEnding,
}

/// What a source was accepted with.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Offered {
    ram_bytes: u64,
    disks: Vec<Value>,
    protocol_version: u64,
    features: String,
}

/// A round that was in place.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Round {
    /// Its number.
    pub round: u32,
    /// Bytes that had come by then.
    pub received_bytes: u64,
    /// When that was, in milliseconds from when the source was accepted.
    pub at_ms: Option<f64>,
}

/// Connections that were lost.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Outage {
    /// How.
    pub why: String,
    /// When, as of a round.
    pub at_ms: Option<f64>,
    /// For how long, where the source came back.
    #[serde(skip)]
    pub after_ms: Option<f64>,
}

/// How it ended.
#[derive(Clone, Debug)]
pub enum ArrivalEnding {
    /// The guest is here.
    Came(Box<Arrived>),
    /// It is not.
    Failed {
        /// In a word: `failed`, `cancelled`, `in-doubt`.
        outcome: String,
        /// Why.
        error: String,
    },
    /// The record ends before the migration does.
    Unfinished,
}

/// What is known of a guest that came.
///
/// ```
/// assert!(!godwit_report::Arrived::default().verified);
/// ```
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Arrived {
    /// `running`, or `paused` as it was.
    pub outcome: String,
    /// Bytes that came over the data channels.
    pub received_bytes: u64,
    /// From the acceptance of the source to the guest running.
    pub total_ms: f64,
    /// Device state loaded.
    pub load_ms: f64,
    /// From COMMIT to the guest running.
    pub resume_ms: f64,
    /// From the last byte of the disks to READY.
    pub disks_to_ready_ms: Option<f64>,
    /// Whether digests were asked for.
    pub verified: bool,
    /// What came when it ran here already.
    pub fetched: Option<Fetched>,
    /// Processor time of this side.
    pub cpu_ms: Option<f64>,
    /// The most memory that this side had.
    pub peak_rss_bytes: Option<u64>,
}

/// What came when the guest ran here already.
///
/// ```
/// assert_eq!(godwit_report::Fetched::default().faults, 0);
/// ```
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Fetched {
    /// How much that was.
    pub missing_bytes: u64,
    /// Pages that somebody waited for.
    pub faults: u64,
    /// How long all of it took.
    pub time_ms: f64,
    /// The longest wait.
    pub longest_wait_us: f64,
}

impl Arrival {
    /// Whether `text` is of a destination: its record, or what `godwit receive --json` printed.
    pub(crate) fn is_in(text: &str) -> bool {
        let events = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        events.take(EVENTS).any(|event| {
            event["side"] == "destination"
                || matches!(event["event"].as_str(), Some("listening" | "accepted"))
        })
    }

    /// Reads one.
    ///
    /// # Errors
    /// The first line that is not JSON, or an event that is none.
    pub fn read(lines: impl BufRead) -> Result<Self, RecordError> {
        let (mut head, mut offered, mut ending) = (Head::default(), None, None);
        let (mut rounds, mut outages) = (Vec::new(), Vec::<Outage>::new());
        each_value(lines, |value| {
            match value["event"].as_str() {
                Some("record") => head = serde_json::from_value(value)?,
                Some("accepted") => offered = Some(serde_json::from_value(value)?),
                Some("round") => rounds.push(serde_json::from_value(value)?),
                Some("severed") => outages.push(serde_json::from_value(value)?),
                Some("resumed") => {
                    if let Some(outage) = outages.last_mut() {
                        outage.after_ms = value["after_ms"].as_f64();
                    }
                }
                Some(_) => {}
                None if value["outcome"].is_string() => {
                    ending = Some(ArrivalEnding::of(value)?);
                }
                None => {}
            }
            Ok(())
        })?;
        if offered.is_none() && ending.is_none() {
            return Err(RecordError::Empty);
        }
        let ending = ending.unwrap_or(ArrivalEnding::Unfinished);
        Ok(Self { head, offered, rounds, outages, ending })
    }

    /// One HTML file that shows it, like [`page`](crate::page()).
    #[must_use]
    pub fn page(&self) -> String {
        let mut html = String::from("<p class=\"note\">The destination's side.</p>");
        html += &subtitle(["on", "listening on"], &self.head);
        match &self.ending {
            ArrivalEnding::Came(arrived) => html += &figures(arrived),
            ArrivalEnding::Failed { error, .. } => {
                let _ = write!(html, "<p class=\"why\">{}</p>", escaped(error));
            }
            ArrivalEnding::Unfinished => {
                html += "<p class=\"why\">The record ends before the migration does.</p>";
            }
        }
        html += &(rounds(&self.rounds) + &self.circumstances());
        document(&self.title(), &html)
    }

    /// What became of it, in a line.
    fn title(&self) -> String {
        let vm = if self.head.vm.is_empty() { "A guest" } else { &self.head.vm };
        match &self.ending {
            ArrivalEnding::Came(arrived) => {
                let how = if arrived.outcome == "paused" { ", paused as it was" } else { "" };
                let (total, load) = (time(arrived.total_ms), time(arrived.load_ms));
                format!("{vm}: came in {total}{how}, loaded in {load}")
            }
            ArrivalEnding::Failed { outcome, .. } => format!("{vm}: {outcome}"),
            ArrivalEnding::Unfinished => format!("{vm}: not finished"),
        }
    }

    fn circumstances(&self) -> String {
        let mut lines = Vec::new();
        if let Some(offered) = &self.offered {
            let Offered { ram_bytes, disks, protocol_version, features } = offered;
            lines.push(("memory", ByteCount(*ram_bytes).to_string()));
            for disk in disks.iter().take(ROWS) {
                let name = disk["name"].as_str().unwrap_or_default();
                let size = ByteCount(disk["size_bytes"].as_u64().unwrap_or(0));
                lines.push(("disk", format!("'{name}' of {size}")));
            }
            let text = format!("version {protocol_version}, features: {features}");
            lines.push(("protocol", text));
        }
        if let ArrivalEnding::Came(arrived) = &self.ending {
            let verified = if arrived.verified { "digests" } else { "checksums of all frames" };
            lines.push(("verified", verified.to_owned()));
            if let Some(it) = &arrived.fetched {
                let (missing, all) = (ByteCount(it.missing_bytes), time(it.time_ms));
                let (faults, longest) = (it.faults, time(it.longest_wait_us / 1e3));
                let text = format!(
                    "{missing} within {all}, {faults} pages waited for, at most for {longest}"
                );
                lines.push(("followed when the guest ran here", text));
            }
        }
        for outage in self.outages.iter().take(ROWS) {
            let at = outage.at_ms.map_or_else(String::new, |at| format!("after {}: ", time(at)));
            let back = outage.after_ms.map_or_else(
                || "the source did not come back".to_owned(),
                |after| format!("back after {}", time(after)),
            );
            lines.push(("connections lost", format!("{at}{}; {back}", outage.why)));
        }
        if lines.is_empty() {
            return String::new();
        }
        let line =
            |(name, value): &(&str, String)| format!("<tr><th>{name}<td>{}</tr>", escaped(value));
        format!("<h2>How</h2><table>{}</table>", lines.iter().map(line).collect::<String>())
    }
}

impl ArrivalEnding {
    fn of(value: Value) -> serde_json::Result<Self> {
        let word = |name: &str| value[name].as_str().unwrap_or_default().to_owned();
        let outcome = word("outcome");
        if !matches!(outcome.as_str(), "running" | "paused") {
            return Ok(Self::Failed { outcome, error: word("error") });
        }
        Ok(Self::Came(Box::new(serde_json::from_value(value)?)))
    }
}

fn time(ms: f64) -> String {
    format_duration(Duration::try_from_secs_f64(ms / 1e3).unwrap_or_default())
}

fn figures(arrived: &Arrived) -> String {
    let used =
        arrived.cpu_ms.map_or_else(|| "not measured".to_owned(), |it| format!("{it:.0} ms CPU"));
    let memory = arrived.peak_rss_bytes.map(|rss| format!("{} memory at most", ByteCount(rss)));
    let disks = arrived.disks_to_ready_ms.map(|it| format!("{} for the disks", time(it)));
    cards_of(&[
        ("Total", time(arrived.total_ms), String::new()),
        ("Received", ByteCount(arrived.received_bytes).to_string(), String::new()),
        ("Device state loaded", time(arrived.load_ms), disks.unwrap_or_default()),
        ("Resumed", time(arrived.resume_ms), String::new()),
        ("Used", used, memory.unwrap_or_default()),
    ])
}

/// A row for each round; of very many for the first and the last ones.
fn rounds(list: &[Round]) -> String {
    if list.is_empty() {
        return String::new();
    }
    let mut html = "<h2>Rounds</h2><div class=\"wide\"><table><tr><th>round<th>in place after\
                    <th>received in it<th>received so far</tr>"
        .to_owned();
    let mut before = 0;
    for (at, round) in list.iter().enumerate() {
        let Round { round, received_bytes, at_ms } = round;
        let part = ByteCount(received_bytes.saturating_sub(before));
        before = *received_bytes;
        if at == ROWS && list.len() > 2 * ROWS {
            let left_out = list.len() - 2 * ROWS;
            let _ =
                write!(html, "<tr><td>…<td colspan=\"3\">{left_out} rounds are left out here</tr>");
        }
        if at >= ROWS && at + ROWS < list.len() {
            continue;
        }
        let when = at_ms.map_or_else(|| "-".to_owned(), time);
        let all = ByteCount(*received_bytes);
        let _ = write!(html, "<tr><td>{round}<td>{when}<td>{part}<td>{all}</tr>");
    }
    html + "</table></div>"
}

/// Sees a guest come, and makes the record of it.
///
/// ```
/// use std::time::Duration;
/// use godwit_report::{Arrival, ArrivalRecorder, Head};
/// use serde_json::json;
///
/// let mut recorder = ArrivalRecorder::new(Head::default());
/// recorder.see(Duration::from_millis(5), &json!({ "event": "accepted", "ram_bytes": 4096 }));
/// let lines = recorder.lines(&json!({ "outcome": "running" }));
/// assert!(Arrival::read(lines.as_bytes())?.offered.is_some());
/// # Ok::<(), godwit_report::RecordError>(())
/// ```
#[derive(Debug)]
pub struct ArrivalRecorder {
    head: Head,
    events: Vec<Value>,
}

impl ArrivalRecorder {
    /// For what `head` tells.
    #[must_use]
    pub fn new(head: Head) -> Self {
        Self { head, events: Vec::new() }
    }

    /// An `event`, as `godwit receive --json` prints it, so long after the source was accepted.
    /// Those that a record is not for are passed by.
    pub fn see(&mut self, at: Duration, event: &Value) {
        let kept = ["accepted", "round", "severed", "resumed"];
        if !event["event"].as_str().is_some_and(|event| kept.contains(&event)) {
            return;
        }
        if self.events.len() == EVENTS {
            self.events.remove(EVENTS / 2);
        }
        let mut event = event.clone();
        event["at_ms"] = (at.as_secs_f64() * 1e3).into();
        self.events.push(event);
    }

    /// The lines of the record, of which `last` is the last one: what `--json` prints in the end.
    #[must_use]
    pub fn lines(&self, last: &Value) -> String {
        let mut head = with_event("record", serde_json::to_value(&self.head));
        head["side"] = "destination".into();
        let lines = std::iter::once(&head).chain(&self.events).chain(std::iter::once(last));
        lines.map(|line| format!("{line}\n")).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn destination(text: &str) -> Arrival {
        assert!(Arrival::is_in(text), "{text}");
        Arrival::read(text.as_bytes()).unwrap()
    }

    fn recorded(rounds: u64, last: &Value) -> Arrival {
        let mut recorder = ArrivalRecorder::new(Head { vm: "<web&01>".into(), ..Head::default() });
        let disks = [json!({ "name": "<vda>", "size_bytes": 1 << 30 })];
        let accepted = json!({
            "event": "accepted", "ram_bytes": 1 << 30, "disks": disks, "protocol_version": 6,
            "features": "trial",
        });
        recorder.see(Duration::ZERO, &accepted);
        for round in 0..rounds {
            let at = Duration::from_millis(10 * (round + 1));
            let bytes = 4096 * (round + 1);
            let event = json!({ "event": "round", "round": round, "received_bytes": bytes });
            recorder.see(at, &event);
        }
        recorder.see(Duration::from_secs(1), &json!({ "event": "severed", "why": "<cut>" }));
        recorder.see(Duration::from_secs(3), &json!({ "event": "resumed", "after_ms": 2000.0 }));
        recorder.see(Duration::from_secs(3), &json!({ "event": "fetching", "left_bytes": 1 }));
        destination(&recorder.lines(last))
    }

    #[test]
    fn what_a_destination_saw_is_read_and_its_page_has_all_of_it() {
        // Mutations: bytes of a round are those of all before; another side's record is taken.
        let last = json!({
            "outcome": "running", "received_bytes": 12288, "total_ms": 250.0, "load_ms": 11.0,
            "resume_ms": 1.5, "verified": true, "cpu_ms": 40.0, "peak_rss_bytes": 1 << 20,
            "disks_to_ready_ms": 6.0, "fetched": null,
        });
        let arrival = recorded(3, &last);
        assert_eq!(arrival.rounds.len(), 3);
        assert_eq!(arrival.outages[0].after_ms, Some(2000.0));
        let html = arrival.page();
        for wanted in [
            "&lt;web&amp;01&gt;: came in 250ms, loaded in 11ms</h1>",
            "The destination's side",
            "<td>2<td>30ms<td>4KiB<td>12KiB",
            "&lt;vda&gt;",
            "after 1s: &lt;cut&gt;; back after 2s",
            "6ms for the disks",
        ] {
            assert!(html.contains(wanted), "{wanted} is not in {html}");
        }
        for unwanted in ["<web", "http", "<script", "url(", "NaN"] {
            assert!(!html.contains(unwanted), "{unwanted} is in {html}");
        }
    }

    #[test]
    fn one_that_failed_says_why_and_the_longest_stays_small() {
        let why = "the link broke; ".repeat(100_000);
        let arrival = recorded(100_000, &json!({ "outcome": "failed", "error": why }));
        assert!(arrival.rounds.len() < EVENTS);
        assert_eq!(arrival.rounds.last().map(|round| round.round), Some(99_999));
        let html = arrival.page();
        assert!(html.contains(": failed</h1>") && html.len() < 100 << 10, "{}", html.len());
        assert!(html.contains("rounds are left out here"));
    }

    #[test]
    fn what_json_printed_is_one_as_well_and_what_the_source_saw_is_none() {
        let printed = "{\"event\":\"listening\",\"address\":\"x\"}\n{\"event\":\"round\",\
                       \"round\":0,\"received_bytes\":5}\n{\"outcome\":\"paused\"}\n";
        let html = destination(printed).page();
        assert!(html.contains("A guest: came in 0s, paused as it was"), "{html}");
        assert!(html.contains("<td>0<td>-<td>5B<td>5B"), "{html}");
        assert!(!Arrival::is_in("{\"event\":\"record\"}\n{\"outcome\":\"migrated\"}\n"));
        let wrong = Arrival::read("{\"event\":\"round\",\"round\":-1}".as_bytes()).unwrap_err();
        assert!(wrong.to_string().starts_with("line 1"), "{wrong}");
        assert!(Arrival::read("{\"event\":\"listening\"}".as_bytes()).is_err());
    }
}
