//! One HTML file that shows a migration: no script, nothing that is fetched, readable on paper, on
//! a telephone, in light and in the dark. It stays under 500 KiB, whatever the migration was like.

use std::fmt::Write;
use std::time::Duration;

use godwit_engine::report::{Measures, Progress, RoundMeasures, Stage};
use godwit_units::{ByteCount, PageCount, Rate, format_duration};
use time::OffsetDateTime;

use crate::chart::{Axis, Series, Shade, Unit, chart};
use crate::heat::heat;
use crate::html::{document, escaped};
use crate::record::{Ending, Head, Moved, Record, Upgrade};

/// A curve has no more points: two for each that a screen can show.
const POINTS: usize = 2000;
/// So many of the first rounds have a row, and as many of the last.
const ROWS: usize = 100;

/// The page of `record`.
///
/// ```
/// use godwit_report::{Record, page};
///
/// let lines = r#"{"outcome":"failed","error":"the link broke","guest":"source"}"#;
/// let html = page(&Record::read(lines.as_bytes())?);
/// assert!(html.starts_with("<!doctype html>") && html.contains("the link broke"));
/// # Ok::<(), godwit_report::RecordError>(())
/// ```
#[must_use]
pub fn page(record: &Record) -> String {
    let title = title(&record.head, &record.ending);
    let mut html = subtitle(["from", "to"], &record.head);
    match &record.ending {
        Ending::Moved(moved) => {
            html += &measures(moved);
            html += &timeline(&record.looks, moved.measures.total);
            html += &downtime(&moved.measures);
            html += &map(&moved.measures);
            html += &rounds(&moved.measures.round_list);
            html += &circumstances(moved);
        }
        Ending::Failed { error, guest, .. } => {
            let _ = write!(html, "<p class=\"why\">{}</p>", escaped(error));
            if !guest.is_empty() {
                let _ = write!(html, "<p>The guest: {}.</p>", escaped(guest));
            }
            html += &timeline(&record.looks, Duration::ZERO);
        }
        Ending::Unfinished => {
            html += "<p class=\"why\">The record ends before the migration does.</p>";
            html += &timeline(&record.looks, Duration::ZERO);
        }
    }
    document(&title, &html)
}

/// What became of it, in a line.
fn title(head: &Head, ending: &Ending) -> String {
    let vm = if head.vm.is_empty() { "A migration" } else { &head.vm };
    match ending {
        Ending::Moved(moved) => {
            let total = format_duration(moved.measures.total);
            let downtime = format_duration(moved.measures.downtime);
            match moved.upgrade {
                Some(_) => format!("{vm}: upgraded in {total}, stopped for {downtime}"),
                None => format!("{vm}: moved in {total}, gone for {downtime}"),
            }
        }
        Ending::Failed { outcome, .. } => format!("{vm}: {outcome}"),
        Ending::Unfinished => format!("{vm}: not finished"),
    }
}

/// Where and when, with the words for the host and the address.
pub(crate) fn subtitle([host, address]: [&str; 2], head: &Head) -> String {
    let parts = [(host, &head.host), (address, &head.to), ("godwit", &head.version)];
    let known = parts.iter().filter(|(_, value)| !value.is_empty());
    let mut parts: Vec<String> = known.map(|(word, value)| format!("{word} {value}")).collect();
    parts.extend(head.began_ms.map(utc));
    format!("<p class=\"sub\">{}</p>", escaped(&parts.join(" · ")))
}

/// A moment in milliseconds since 1970, as ISO 8601 has it; nothing where that is none.
fn utc(ms: u64) -> String {
    let seconds = i64::try_from(ms / 1000).unwrap_or(i64::MAX);
    OffsetDateTime::from_unix_timestamp(seconds).map_or_else(
        |_| String::new(),
        |at| {
            let (date, time) = (at.date(), at.time());
            let (hour, minute, second) = time.as_hms();
            format!("{date} {hour:02}:{minute:02}:{second:02} UTC")
        },
    )
}

/// The six measures of a migration's quality.
fn measures(moved: &Moved) -> String {
    let Measures { setup, total, downtime, sent, ram, lost, throttled, tracked, .. } =
        moved.measures;
    let slower = match throttled.is_zero() {
        true if tracked.is_zero() => "never slowed".to_owned(),
        true => format!("never slowed; {} with writes tracked", format_duration(tracked)),
        false => format!("slowed for {}", format_duration(throttled)),
    };
    let used = match (moved.cpu_ms, moved.peak_rss_bytes) {
        (Some(cpu), Some(rss)) => {
            (format!("{cpu:.0} ms CPU"), format!("{} memory at most, this side", ByteCount(rss)))
        }
        (Some(cpu), None) => (format!("{cpu:.0} ms CPU"), "this side".to_owned()),
        _ => ("not measured".to_owned(), String::new()),
    };
    let rounds = moved.measures.rounds;
    let cards = [
        ("Set-up", format_duration(setup), String::new()),
        ("Total", format_duration(total), format!("{rounds} rounds")),
        ("Downtime", format_duration(downtime), String::new()),
        ("Sent", sent.to_string(), format!("for {ram} of RAM")),
        ("Guest time lost", format_duration(lost), slower),
        ("Used", used.0, used.1),
    ];
    cards_of(&cards)
}

/// Figures with their names, and a note to each.
pub(crate) fn cards_of(cards: &[(&str, String, String)]) -> String {
    let card = |(name, value, note): &(&str, String, String)| {
        let (value, note) = (escaped(value), escaped(note));
        format!("<div><dt>{name}</dt><dd><b>{value}</b><small>{note}</small></dd></div>")
    };
    format!("<dl class=\"cards\">{}</dl>", cards.iter().map(card).collect::<String>())
}

/// Rates, what remains, and the guest's speed over time.
fn timeline(looks: &[Progress], total: Duration) -> String {
    let Some(last) = looks.last() else { return String::new() };
    let axis = Axis {
        end: last.elapsed.max(total).as_secs_f64(),
        rounds: looks.iter().filter(|look| look.round_ended).map(at).collect(),
        shades: shades(looks),
    };
    // From the end, since that is always shown.
    let shown = looks.iter().rev().step_by(looks.len().div_ceil(POINTS));
    let mut shown: Vec<&Progress> = shown.collect();
    shown.reverse();
    let series = |name, steps, value: fn(&Progress) -> Option<f64>| Series {
        name,
        points: shown.iter().map(|look| (at(look), value(look))).collect(),
        steps,
    };
    let rate = |rate: f64| Rate::from_bytes_per_second(rate).to_string();
    let share = |share: f64| format!("{:.0} %", share * 100.0);
    let bytes = |bytes: f64| ByteCount(bytes as u64).to_string();
    let rates = [
        series("the link carries", true, |look| look.bandwidth.map(|it| it.bytes_per_second())),
        series("the guest dirties", true, |look| look.dirty_rate.map(|it| it.bytes_per_second())),
    ];
    let left = [series("memory left to send", false, |look| Some(look.remaining.0 as f64))];
    let guest = [
        series("the guest's speed", true, |look| Some(look.guest_speed.unwrap_or(1.0))),
        series("throttle", true, |look| Some(look.throttle)),
    ];
    let mut html = "<h2>Over time</h2>".to_owned();
    html += &chart("Rates", &axis, &rates, Unit::Bytes, rate);
    html += &chart("Left", &axis, &left, Unit::Bytes, bytes);
    html += &chart("The guest", &axis, &guest, Unit::Share, share);
    html + "<p class=\"note\">Thin lines: rounds ended. Shaded: the guest stopped, or connections \
            lost.</p>"
}

fn at(look: &Progress) -> f64 {
    look.elapsed.as_secs_f64()
}

/// When the guest was stopped, and when connections were lost.
fn shades(looks: &[Progress]) -> Vec<Shade> {
    let why = |look: &Progress| match look.stage {
        _ if look.severed.is_some() => Some("connections lost"),
        Stage::PreCopy | Stage::PostCopy => None,
        Stage::StopAndCopy | Stage::Handover => Some("the guest is stopped"),
    };
    let mut shades: Vec<Shade> = Vec::new();
    let mut open = None;
    for look in looks {
        let now = why(look);
        match (open, shades.last_mut()) {
            (Some(before), Some(shade)) if now == Some(before) => shade.to = at(look),
            (_, last) => {
                if let (Some(_), Some(shade)) = (open, last) {
                    shade.to = at(look);
                }
                if let Some(why) = now {
                    shades.push(Shade { from: at(look), to: at(look), why });
                }
            }
        }
        open = now;
    }
    shades
}

/// Where the downtime went, step by step.
fn downtime(measures: &Measures) -> String {
    let parts = &measures.parts;
    let steps = [
        ("devices drained", parts.drain),
        ("last pages", parts.copy),
        ("verified", parts.verify),
        ("copied to a third place", parts.safe),
        ("device state saved", parts.save),
        ("loaded", parts.load),
        ("handed over", parts.handover),
    ];
    let whole: Duration = steps.iter().map(|(_, time)| *time).sum();
    if whole.is_zero() {
        return String::new();
    }
    let (mut bar, mut list) = (String::new(), String::new());
    for (number, (name, time)) in steps.iter().enumerate().filter(|(_, step)| !step.1.is_zero()) {
        let share = time.as_secs_f64() / whole.as_secs_f64() * 100.0;
        let words = format!("{name}: {}", format_duration(*time));
        let _ = write!(
            bar,
            "<span class=\"d{number}\" style=\"width:{share:.2}%\" title=\"{words}\"></span>"
        );
        let _ = write!(list, "<li class=\"key d{number}\">{words}</li>");
    }
    format!(
        "<h2>Where the downtime went</h2><div class=\"bar\">{bar}</div>\
         <ul class=\"keys\">{list}</ul>"
    )
}

/// Where in memory pages were sent, round by round.
fn map(measures: &Measures) -> String {
    let parts = measures.memory_map.iter().map(Vec::len).max().unwrap_or(0);
    if parts == 0 {
        return String::new();
    }
    let pages = measures.ram.0 / PageCount(1).bytes().0 / parts as u64;
    let map = heat(&measures.memory_map, pages);
    let rounds = measures.memory_map.len();
    format!(
        "<h2>Memory, round by round</h2><figure><figcaption>Left to right: {rounds} rounds. Top to \
         bottom: guest memory, {} a row. The stronger the colour, the more of it was sent.\
         </figcaption>{map}</figure>",
        PageCount(pages).bytes()
    )
}

/// A row for each round; of very many for the first and the last ones.
fn rounds(list: &[RoundMeasures]) -> String {
    if list.is_empty() {
        return String::new();
    }
    let mut html =
        "<h2>Rounds</h2><div class=\"wide\"><table><tr><th>round<th>time<th>sent<th>pages\
                    <th>zero<th>unchanged<th>left<th>throttle</tr>"
            .to_owned();
    let left_out = list.len().saturating_sub(2 * ROWS);
    let first = if left_out == 0 { list.len() } else { ROWS };
    html.extend(list[..first].iter().map(row));
    if left_out > 0 {
        let _ = write!(
            html,
            "<tr><td>…<td colspan=\"7\">{left_out} rounds are left out here; the record has \
             them</tr>"
        );
    }
    html.extend(list[first + left_out..].iter().map(row));
    html + "</table></div>"
}

fn row(round: &RoundMeasures) -> String {
    let cut = if round.cut_off { " (cut off)" } else { "" };
    format!(
        "<tr><td>{}{cut}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{:.0} %</tr>",
        round.round,
        format_duration(round.time),
        round.sent,
        round.data.0,
        round.zero.0,
        round.unchanged.0,
        round.remaining.bytes(),
        round.throttle * 100.0
    )
}

/// How it was done.
fn circumstances(Moved { measures, upgrade, .. }: &Moved) -> String {
    let mut lines: Vec<(&str, String)> = upgrade.iter().flat_map(qemus).collect();
    lines.extend([
        ("channels", measures.channels.to_string()),
        ("codecs", measures.codecs.clone()),
        (
            "protocol",
            format!("version {}, features: {}", measures.protocol_version, measures.features),
        ),
        (
            "verified",
            if measures.verified { "digests equal" } else { "checksums of all frames" }.into(),
        ),
    ]);
    if measures.resumptions > 0 {
        let (times, time) = (measures.resumptions, format_duration(measures.severed));
        lines.push(("taken up again", format!("{times} times, lost for {time} in all")));
    }
    if let Some(it) = &measures.post_copy {
        let time = format_duration(it.time);
        let text = format!("{} within {time}, {} pages asked for", it.missing, it.asked);
        lines.push(("followed when the guest ran there", text));
    }
    for disk in &measures.disks {
        lines.push(("disk", format!("'{}' of {}: {} sent", disk.name, disk.size, disk.sent)));
    }
    let line =
        |(name, value): &(&str, String)| format!("<tr><th>{name}<td>{}</tr>", escaped(value));
    format!("<h2>How</h2><table>{}</table>", lines.iter().map(line).collect::<String>())
}

/// Which QEMU the guest has left for which, and with what memory.
fn qemus(upgrade: &Upgrade) -> Vec<(&'static str, String)> {
    let Upgrade { memory, pid, version, old_pid, old_version, remarks } = upgrade;
    let qemu = |version: &Option<String>, pid: &Option<i64>| {
        let version = version.as_deref().unwrap_or("of no known version");
        let pid = pid.map_or_else(String::new, |pid| format!(", process {pid}"));
        format!("{version}{pid}")
    };
    let memory = if memory == "in-place" { "where it was" } else { "copied within the host" };
    let mut lines = vec![
        ("the old QEMU", qemu(old_version, old_pid)),
        ("the new QEMU", qemu(version, pid)),
        ("memory", memory.to_owned()),
    ];
    if !remarks.is_empty() {
        lines.push(("remarks", remarks.join("; ")));
    }
    lines
}

#[cfg(test)]
mod tests {
    use godwit_engine::report::DiskMeasures;
    use serde_json::{Value, json};

    use super::*;
    use crate::record::Recorder;

    fn look(at: u64, stage: &str, severed: Value) -> Progress {
        serde_json::from_value(json!({
            "elapsed_ms": at, "stage": stage, "round": 0, "round_ended": at == 200,
            "sent_bytes": at, "remaining_bytes": 1000 - at, "dirty_bytes_per_second": 4e6,
            "bandwidth_bytes_per_second": 1e9, "expected_downtime_ms": null,
            "remaining_time": null, "throttle": 0.0, "guest_speed": 0.5, "delayed_segments": 0,
            "disk_limit_bytes_per_second": null, "severed": severed, "advice": null,
            "warning": null,
        }))
        .unwrap()
    }

    fn lost() -> Value {
        json!({ "since_ms": 1, "left_ms": 2, "attempts": 3, "why": "cut" })
    }

    #[test]
    fn times_of_day_are_those_of_date() {
        // date -u -d @SECONDS
        assert_eq!(utc(u64::MAX), "");
        for (seconds, date) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (1_795_449_599, "2026-11-23 15:59:59 UTC"),
            (4_107_542_400, "2100-03-01 00:00:00 UTC"),
        ] {
            assert_eq!(utc(seconds * 1000), date);
        }
    }

    #[test]
    fn what_stands_still_is_shaded() {
        let looks = [
            look(0, "pre-copy", Value::Null),
            look(100, "pre-copy", lost()),
            look(150, "pre-copy", lost()),
            look(200, "pre-copy", Value::Null),
            look(300, "stop-and-copy", Value::Null),
            look(320, "handover", Value::Null),
        ];
        let shades: Vec<_> = shades(&looks).iter().map(|it| (it.from, it.to, it.why)).collect();
        assert_eq!(shades, [(0.1, 0.2, "connections lost"), (0.3, 0.32, "the guest is stopped")]);
    }

    #[test]
    fn a_page_has_all_of_it_and_fetches_nothing() {
        let mut recorder = Recorder::new(Head { vm: "<web&01>".into(), ..Head::default() });
        recorder.see(&look(0, "pre-copy", Value::Null));
        recorder.see(&look(200, "stop-and-copy", Value::Null));
        let measures = Measures {
            total: Duration::from_millis(250),
            downtime: Duration::from_millis(11),
            memory_map: vec![vec![3, 0, 1]],
            ram: ByteCount(12 << 12),
            round_list: vec![RoundMeasures::default()],
            ..Measures::default()
        };
        let mut last = serde_json::to_value(measures).unwrap();
        last["outcome"] = "migrated".into();
        last["copy_ms"] = 10.0.into();
        last["load_ms"] = 1.0.into();
        let html = page(&Record::read(recorder.lines(&last).as_bytes()).unwrap());
        for wanted in [
            "&lt;web&amp;01&gt;: moved in 250ms, gone for 11ms",
            "Where the downtime went",
            "last pages: 10ms",
            "Memory, round by round",
            "<th>round",
            "class=\"shade\"",
            "prefers-color-scheme: dark",
        ] {
            assert!(html.contains(wanted), "{wanted} is not in {html}");
        }
        for unwanted in ["<web", "http", "<script", "url(", "NaN", "inf%"] {
            assert!(!html.contains(unwanted), "{unwanted} is in {html}");
        }
    }

    #[test]
    fn the_page_of_an_upgrade_tells_which_qemu_it_left_for_which() {
        let measures = Measures {
            total: Duration::from_millis(250),
            downtime: Duration::from_millis(11),
            ..Measures::default()
        };
        let mut last = serde_json::to_value(measures).unwrap();
        let own = json!({ "outcome": "upgraded", "memory": "in-place", "pid": 17,
            "version": "10.0.2", "old_pid": 16, "old_version": "7.2.22", "remarks": ["<late>"] });
        last.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
        let html = page(&Record::read(last.to_string().as_bytes()).unwrap());
        for wanted in [
            "A migration: upgraded in 250ms, stopped for 11ms",
            "<th>the old QEMU<td>7.2.22, process 16",
            "<th>the new QEMU<td>10.0.2, process 17",
            "<th>memory<td>where it was",
            "<th>remarks<td>&lt;late&gt;",
        ] {
            assert!(html.contains(wanted), "{wanted} is not in {html}");
        }
        assert!(!html.contains("NaN") && !html.contains("class=\"why\""), "{html}");
    }

    /// The most that a record of a migration can hold, and more rounds than any has.
    fn longest() -> Record {
        let disk = DiskMeasures { name: "\"".repeat(255), ..DiskMeasures::default() };
        let round = |number: u32| RoundMeasures {
            round: number,
            time: Duration::from_micros(59_999_999),
            data: PageCount(1 << 40),
            zero: PageCount(1 << 40),
            unchanged: PageCount(1 << 40),
            sent: ByteCount((1 << 50) - 1),
            remaining: PageCount((1 << 38) - 1),
            throttle: 0.99,
            cut_off: true,
            ..RoundMeasures::default()
        };
        let measures = Measures {
            total: Duration::from_secs(10_000),
            ram: ByteCount(1 << 40),
            codecs: "&".repeat(100_000),
            features: "<".repeat(100_000),
            memory_map: (0..65)
                .map(|at| (0..128).map(|part| (at + part) % 2 * 999).collect())
                .collect(),
            round_list: (0..10_000).map(round).collect(),
            disks: vec![disk; 64],
            ..Measures::default()
        };
        let stage = |at: u64| if at.is_multiple_of(3) { "stop-and-copy" } else { "pre-copy" };
        let severed = |at: u64| if at.is_multiple_of(5) { lost() } else { Value::Null };
        let looks = (0..6_000).map(|at| Progress {
            elapsed: Duration::from_millis(at * 500),
            round_ended: true,
            remaining: ByteCount(at % 7 * 1_000_000),
            ..look(0, stage(at), severed(at))
        });
        let name = "\u{1b}'".repeat(100_000);
        Record {
            head: Head {
                vm: name.clone(),
                to: name.clone(),
                host: name.clone(),
                ..Head::default()
            },
            looks: looks.collect(),
            ending: Ending::Moved(Box::new(Moved { measures, ..Moved::default() })),
        }
    }

    #[test]
    fn the_longest_page_stays_under_500_kib() {
        // Mutations: an element for each part of the map, a row for each round, a point for each
        // look, texts as long as they come.
        let mut record = longest();
        let html = page(&record);
        assert!(html.len() < 500 << 10, "{} KiB", html.len() >> 10);
        assert!(html.contains("9800 rounds are left out here"));
        assert!(html.contains("<td>99 (cut off)") && html.contains("<td>9900 (cut off)"));
        let why = "the link broke; ".repeat(100_000);
        let outcome = why.clone();
        record.ending = Ending::Failed { outcome, guest: why.clone(), error: why };
        let html = page(&record);
        assert!(html.len() < 500 << 10, "{} KiB", html.len() >> 10);
    }
}
