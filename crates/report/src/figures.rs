//! Figures that are no migration's: what a benchmark or a soak has written, and what `godwit
//! simulate --json` prints; and their page.
//!
//! Invariant: the page stays under 500 KiB whatever is in the file: rows and plots are added only
//! while there is room, and what is left out is counted.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::time::Duration;

use godwit_units::{ByteCount, Rate, format_duration};
use serde_json::{Map, Value};

use crate::chart::{Axis, LARGEST, Series, Unit, chart};
use crate::html::{document, escaped};

/// Beyond so much nothing more is added: what follows the last row has room behind it.
const ROOM: usize = 440 << 10;
/// Columns of a table, and letters of a cell.
const COLUMNS: usize = 12;
const LETTERS: usize = 100;
/// Single figures that are shown of one list.
const CARDS: usize = 32;
/// Points of a plot.
const POINTS: usize = 500;
/// A simulation's cases that are plotted.
const PLOTTED: usize = 12;

/// What a run of a benchmark, or simulations, came to.
///
/// ```
/// use godwit_report::Figures;
///
/// let text = r#"{"name":"soak","targets":[
///     {"name":"BUGs","value":0.0,"limit":0.0,"better":"lower","met":true}]}"#;
/// let figures = Figures::read(text).expect("figures");
/// assert!(figures.page().contains("soak: 1 of 1 targets met"));
/// assert!(Figures::read(r#"{"outcome":"migrated"}"#).is_none());
/// ```
#[derive(Clone, Debug)]
pub struct Figures(Kind);

#[derive(Clone, Debug)]
enum Kind {
    /// Targets, and whatever else was measured.
    Run(Map<String, Value>),
    /// Lines of simulated migrations, or evacuations.
    Simulated(Vec<Map<String, Value>>),
}

impl Figures {
    /// Reads them; `None` where `text` is anything else.
    #[must_use]
    pub fn read(text: &str) -> Option<Self> {
        if let Ok(Value::Object(run)) = serde_json::from_str(text)
            && run.get("targets").is_some_and(Value::is_array)
        {
            return Some(Self(Kind::Run(run)));
        }
        let lines = text.lines().filter(|line| !line.trim().is_empty());
        let read = |line| match serde_json::from_str(line) {
            Ok(Value::Object(map)) if map.get("simulated") == Some(&Value::Bool(true)) => Some(map),
            _ => None,
        };
        let lines: Vec<Map<String, Value>> = lines.map(read).collect::<Option<_>>()?;
        (!lines.is_empty()).then_some(Self(Kind::Simulated(lines)))
    }

    /// One HTML file with all of it, as [`page`](crate::page) makes one of a migration.
    #[must_use]
    pub fn page(&self) -> String {
        match &self.0 {
            Kind::Run(run) => run_page(run),
            Kind::Simulated(lines) => simulated_page(lines),
        }
    }
}

fn run_page(run: &Map<String, Value>) -> String {
    let empty = Vec::new();
    let targets = run.get("targets").and_then(Value::as_array).unwrap_or(&empty);
    let met = targets.iter().filter(|target| target["met"] == true).count();
    let name = run.get("name").and_then(Value::as_str).unwrap_or("A run");
    let title = format!("{name}: {met} of {} targets met", targets.len());
    let machine = run.get("machine").and_then(Value::as_str).unwrap_or_default();
    let mut html = format!("<p class=\"sub\">{}</p>", escaped(machine));
    html += "<h2>Targets</h2>";
    let head = ["target", "value", "limit", "verdict", "rounds"];
    table(&mut html, &head, targets, |target| {
        let sign = if target["better"] == "lower" { "≤" } else { "≥" };
        let spread = target["spread"].as_array().map(|it| it.iter().map(cell).collect());
        let spread: Vec<String> = spread.unwrap_or_default();
        vec![
            cell(&target["name"]),
            cell(&target["value"]),
            format!("{sign} {}", cell(&target["limit"])),
            verdict(target).to_owned(),
            spread.join(" to "),
        ]
    });
    let known = ["name", "machine", "targets"];
    let rest: Map<String, Value> =
        run.iter().filter(|(key, _)| !known.contains(&key.as_str())).map(owned).collect();
    html += &cards(&rest);
    for (key, value) in &rest {
        section(&mut html, key, value);
    }
    document(&title, &html)
}

fn owned((key, value): (&String, &Value)) -> (String, Value) {
    (key.clone(), value.clone())
}

/// In words, since not everybody sees colours.
fn verdict(target: &Value) -> &'static str {
    match (target["met"] == true, target["within_noise"] == true) {
        (true, false) => "met",
        (true, true) => "met, within the noise",
        (false, false) => "MISSED",
        (false, true) => "missed, within the noise",
    }
}

/// Each single figure of `map`.
fn cards(map: &Map<String, Value>) -> String {
    let single = |value: &Value| !value.is_array() && !value.is_object() && !value.is_null();
    let card = |(key, value): (&String, &Value)| {
        let (key, value) = (escaped(&words(key)), escaped(&measure(key, value)));
        format!("<div><dt>{key}</dt><dd><b>{value}</b></dd></div>")
    };
    let cards: String = map.iter().filter(|it| single(it.1)).take(CARDS).map(card).collect();
    if cards.is_empty() { cards } else { format!("<dl class=\"cards\">{cards}</dl>") }
}

/// What is more than a single figure: rows, numbers one behind the other, or figures by name.
fn section(html: &mut String, key: &str, value: &Value) {
    let some = match value {
        Value::Array(list) => !list.is_empty(),
        Value::Object(map) => !map.is_empty(),
        _ => false,
    };
    if !some || html.len() > ROOM {
        return;
    }
    let _ = write!(html, "<h2>{}</h2>", escaped(&words(key)));
    match value {
        Value::Array(list) if list.iter().all(Value::is_object) => rows(html, list),
        Value::Array(list) if list.iter().all(Value::is_number) => {
            plot(html, key, list.iter().map(Value::as_f64));
        }
        Value::Array(list) => table(html, &["value"], list, |value| vec![cell(value)]),
        Value::Object(map) => {
            let all: Vec<(String, Value)> = map.iter().map(owned).collect();
            table(html, &["", "value"], &all, |(key, value)| vec![words(key), cell(value)]);
        }
        _ => {}
    }
}

/// A plot of each column that has numbers, and a table.
fn rows(html: &mut String, list: &[Value]) {
    let mut names: Vec<&str> = Vec::new();
    let mut known = BTreeSet::new();
    for key in list.iter().filter_map(Value::as_object).flat_map(Map::keys) {
        if known.insert(key) {
            names.push(key);
        }
    }
    // What is told in a word goes first.
    let texts = list.iter().filter_map(Value::as_object).flatten();
    let texts: BTreeSet<&str> =
        texts.filter(|it| it.1.is_string()).map(|(key, _)| key.as_str()).collect();
    let (mut shown, others): (Vec<&str>, Vec<&str>) =
        names.into_iter().partition(|name| texts.contains(name));
    let texts = shown.len().min(COLUMNS / 2);
    shown.truncate(texts);
    shown.extend(others);
    shown.truncate(COLUMNS);
    for name in shown.iter().filter(|_| list.len() > 2) {
        let values = || list.iter().map(|row| row[*name].as_f64());
        let differs = values().flatten().any(|value| Some(value) != values().flatten().next());
        if differs && html.len() < ROOM {
            plot(html, name, values());
        }
    }
    let heads: Vec<String> = shown.iter().map(|name| words(name)).collect();
    let heads: Vec<&str> = heads.iter().map(String::as_str).collect();
    table(html, &heads, list, |row| shown.iter().map(|name| cell(&row[*name])).collect());
}

/// A table of `list`, as far as there is room.
fn table<T>(html: &mut String, heads: &[&str], list: &[T], row: impl Fn(&T) -> Vec<String>) {
    *html += "<div class=\"wide\"><table class=\"texts\"><tr>";
    for head in heads {
        let _ = write!(html, "<th>{}", escaped(head));
    }
    *html += "</tr>";
    let mut shown = 0;
    for it in list {
        if html.len() > ROOM {
            break;
        }
        let cells = row(it).into_iter().map(|text| format!("<td>{}", escaped(&text)));
        let _ = write!(html, "<tr>{}</tr>", cells.collect::<String>());
        shown += 1;
    }
    *html += "</table></div>";
    if shown < list.len() {
        let left = list.len() - shown;
        let _ = write!(html, "<p class=\"note\">{left} rows are left out; the file has them.</p>");
    }
}

/// Values one behind the other, with the least, the middle and the most in words.
fn plot(html: &mut String, name: &str, values: impl Iterator<Item = Option<f64>>) {
    let values: Vec<(usize, f64)> =
        values.enumerate().filter_map(|(at, it)| Some((at, it?.clamp(-1e300, 1e300)))).collect();
    let mut sorted: Vec<f64> = values.iter().map(|it| it.1).collect();
    sorted.sort_by(f64::total_cmp);
    let (Some(least), Some(most)) = (sorted.first(), sorted.last()) else { return };
    let (low, high) = (least.min(0.0), most.max(0.0));
    let height = if high > low { high - low } else { 1.0 };
    let last = values.last().map_or(1, |it| it.0.max(1)) as f64;
    let mut path = String::new();
    for (at, value) in values.iter().step_by(values.len().div_ceil(POINTS)) {
        let letter = if path.is_empty() { 'M' } else { 'L' };
        let (x, y) = (*at as f64 / last * 1000.0, (high - value) / height * 100.0);
        let _ = write!(path, "{letter}{x:.1} {y:.1}");
    }
    let say = |value: f64| measure(name, &value.into());
    let told = format!(
        "{} least, {} in the middle, {} most",
        say(*least),
        say(sorted[sorted.len() / 2]),
        say(*most)
    );
    let name = escaped(&words(name));
    let _ = write!(
        html,
        "<figure><figcaption><b>{name}</b>{}</figcaption><svg class=\"spark\" viewBox=\"0 0 1000 \
         100\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"{name}\"><path class=\"line \
         s0\" d=\"{path}\"/></svg></figure>",
        escaped(&told)
    );
}

fn simulated_page(lines: &[Map<String, Value>]) -> String {
    let moves: Vec<&Map<String, Value>> =
        lines.iter().filter(|line| line.get("outcome").is_some_and(Value::is_object)).collect();
    let (mut html, title) = match moves.first() {
        None => {
            ("<p class=\"sub\">in virtual time</p>".to_owned(), "A simulated evacuation".into())
        }
        Some(first) => {
            let name = first.get("scenario").map(cell).unwrap_or_default();
            let what = if moves.len() == 1 { "migration" } else { "migrations" };
            let sub = "<p class=\"sub\">in virtual time</p>".to_owned();
            (sub, format!("{name}: {} simulated {what}", moves.len()))
        }
    };
    if !moves.is_empty() {
        let head = ["case", "end", "total", "downtime", "sent", "lost", "throttle", "why"];
        table(&mut html, &head, &moves, |line| {
            let outcome = &line["outcome"];
            let number = |key: &str| outcome[key].as_f64().unwrap_or_default();
            let time = |key: &str| seconds(number(key));
            vec![
                cell(line.get("case").unwrap_or(&Value::Null)),
                cell(&outcome["end"]),
                time("total"),
                time("downtime"),
                ByteCount(number("sent") as u64).to_string(),
                time("lost_work"),
                share(number("throttle")),
                cell(&outcome["reason"]),
            ]
        });
        for line in moves.iter().take(PLOTTED) {
            over_time(&mut html, line);
        }
        if moves.len() > PLOTTED {
            let left = moves.len() - PLOTTED;
            let _ = write!(html, "<p class=\"note\">{left} more are in the table alone.</p>");
        }
    }
    for line in lines.iter().filter(|line| !line.get("outcome").is_some_and(Value::is_object)) {
        if html.len() < ROOM {
            html += &cards(line);
        }
        line.iter().for_each(|(key, value)| section(&mut html, key, value));
    }
    document(&title, &html)
}

/// The rounds of a simulated migration, as those of one that was made.
fn over_time(html: &mut String, line: &Map<String, Value>) {
    let outcome = &line["outcome"];
    let Some(rounds) = outcome["rounds"].as_array().filter(|it| !it.is_empty()) else { return };
    if html.len() > ROOM {
        return;
    }
    // Of any file: what is out of all proportion is drawn, and nothing more.
    let of =
        |round: &Value, key: &str| round[key].as_f64().unwrap_or_default().clamp(-LARGEST, LARGEST);
    let end = |round: &Value| of(round, "start") + of(round, "seconds");
    let last = rounds.iter().map(end).fold(0.0, f64::max);
    let total = of(outcome, "total");
    let axis = Axis {
        end: last.max(total),
        rounds: rounds.iter().map(end).take(POINTS).collect(),
        shades: Vec::new(),
    };
    let shown: Vec<&Value> = rounds.iter().step_by(rounds.len().div_ceil(POINTS)).collect();
    let series = |name, value: &dyn Fn(&Value) -> f64| Series {
        name,
        points: shown.iter().map(|round| (of(round, "start"), Some(value(round)))).collect(),
        steps: true,
    };
    let rate = |round: &Value| of(round, "sent") / of(round, "seconds").max(1e-9);
    let rates = [series("sent", &rate)];
    let guest = [
        series("the guest's speed", &|round| of(round, "speed")),
        series("throttle", &|round| of(round, "throttle")),
    ];
    let case = line.get("case").map(cell).unwrap_or_default();
    let _ = write!(html, "<h2>{}</h2>", escaped(&case));
    let told = |rate: f64| Rate::from_bytes_per_second(rate).to_string();
    *html += &chart("Rates", &axis, &rates, Unit::Bytes, told);
    *html += &chart("The guest", &axis, &guest, Unit::Share, share);
}

fn share(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

/// A time of any file's: what is none is nothing.
fn seconds(seconds: f64) -> String {
    Duration::try_from_secs_f64(seconds).map_or_else(|_| "?".to_owned(), format_duration)
}

/// A key as words.
fn words(key: &str) -> String {
    key.replace('_', " ").chars().take(LETTERS).collect()
}

/// A value by what its key says that it is.
fn measure(key: &str, value: &Value) -> String {
    match value.as_f64() {
        Some(ms) if key.ends_with("_ms") => seconds(ms / 1e3),
        Some(time) if key.ends_with("seconds") && !key.contains("per_second") => seconds(time),
        Some(bytes) if key.ends_with("bytes") && bytes >= 0.0 => {
            ByteCount(bytes as u64).to_string()
        }
        Some(_) if key == "seed" => value.to_string(),
        _ => cell(value),
    }
}

/// A value as the text of a cell.
fn cell(value: &Value) -> String {
    let text = match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Number(number) => return number.as_f64().map_or_else(|| number.to_string(), short),
        other => other.to_string(),
    };
    let cut = text.chars().take(LETTERS).collect::<String>();
    if cut.len() < text.len() { cut + "…" } else { cut }
}

/// With as many digits as anybody reads.
fn short(value: f64) -> String {
    let size = value.abs();
    if value.fract() == 0.0 && size < 1e15 {
        return format!("{value:.0}");
    }
    match size {
        _ if !(1e-3..1e15).contains(&size) => format!("{value:.2e}"),
        _ if size >= 100.0 => format!("{value:.0}"),
        _ if size >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn run(rows: Vec<Value>) -> Value {
        let target = |name: &str, met: bool, noise: bool| {
            json!({ "name": name, "value": 12.345, "limit": 20.0, "better": "lower",
                    "spread": [11.0, 13.0], "met": met, "within_noise": noise })
        };
        json!({
            "name": "<soak>", "machine": "2 cores", "seed": 1_795_465_865_195_u64,
            "seconds": 128.66, "rows": rows, "gaps": [1, 2, 4], "problems": [],
            "part": { "moved": 4, "more": { "a": 1 } },
            "targets": [target("downtime", true, false), target("BUGs", false, false),
                        target("rate", true, true)],
        })
    }

    fn page(value: &Value) -> String {
        Figures::read(&serde_json::to_string_pretty(value).unwrap()).unwrap().page()
    }

    #[test]
    fn a_run_has_its_targets_and_all_that_was_measured() {
        let row = |ms: f64| json!({ "vm": "a<b", "downtime_ms": ms, "verdict": "moved" });
        let html = page(&run(vec![row(1.0), row(2.5), row(40.0)]));
        for wanted in [
            "&lt;soak&gt;: 2 of 3 targets met",
            "2 cores",
            "1795465865195",
            "<td>≤ 20",
            "<td>MISSED",
            "<td>met, within the noise",
            "11 to 13",
            "12.3",
            "<h2>rows</h2>",
            "<td>a&lt;b",
            "1ms least, 2.5ms in the middle, 40ms most",
            "<h2>gaps</h2>",
            "<td>moved<td>4",
            "prefers-color-scheme: dark",
            "width=device-width",
        ] {
            assert!(html.contains(wanted), "{wanted} is not in {html}");
        }
        for unwanted in ["<soak", "http", "<script", "url(", "NaN", "<h2>problems"] {
            assert!(!html.contains(unwanted), "{unwanted} is in {html}");
        }
    }

    #[test]
    fn simulated_migrations_are_compared_and_each_has_its_rounds() {
        let line = |case: &str| {
            json!({ "simulated": true, "scenario": "busy", "case": case, "outcome": {
                "end": "moved", "total": 5.8, "downtime": 0.289, "sent": 778_879_212.5,
                "lost_work": 2.9, "throttle": 0.99, "reason": null, "rounds": [
                    { "start": 0.0, "seconds": 2.8, "sent": 3.7e8, "speed": 1.0, "throttle": 0.0 },
                    { "start": 2.8, "seconds": 2.0, "sent": 2.6e8, "speed": 0.1, "throttle": 0.9 },
                ] } })
        };
        let lines = format!("{}\n\n{}\n", line("off"), line("<direct>"));
        let html = Figures::read(&lines).unwrap().page();
        for wanted in
            ["busy: 2 simulated migrations", "<td>289ms", "<h2>&lt;direct&gt;", "throttle", "99 %"]
        {
            assert!(html.contains(wanted), "{wanted} is not in {html}");
        }
        let html = Figures::read(r#"{"simulated":true,"hosts":20,"seconds":90.5}"#).unwrap().page();
        assert!(html.contains("A simulated evacuation") && html.contains("<b>20</b>"), "{html}");
        assert!(html.contains("1min 30s") || html.contains("90.5s"), "{html}");
    }

    #[test]
    fn what_is_neither_is_left_to_others() {
        for text in ["", "{}", "[]", "x", r#"{"targets":1}"#, r#"{"outcome":"migrated"}"#] {
            assert!(Figures::read(text).is_none(), "{text}");
        }
        let mixed = "{\"simulated\":true}\n{\"event\":\"progress\"}";
        assert!(Figures::read(mixed).is_none());
    }

    #[test]
    fn the_page_of_any_file_stays_under_500_kib() {
        // Mutation: rows and plots without a limit.
        let name = |at: usize| format!("<{at}>{}", "&".repeat(300));
        let row: Map<String, Value> = (0..40).map(|at| (name(at), name(at).into())).collect();
        let numbers: Map<String, Value> = (0..40).map(|at| (name(at), at.into())).collect();
        let mut all = run(vec![Value::Object(row.clone()); 200]);
        for at in 0..100 {
            all[name(at)] = json!(vec![1e300; 3_000]);
            all[format!("{at}x")] = json!(vec![Value::Object(numbers.clone()); 5]);
        }
        let html = page(&all);
        assert!(html.len() < 500 << 10, "{} KiB", html.len() >> 10);
        assert!(html.contains("rows are left out"));
        let round = json!({ "start": -1e300, "seconds": 1e308, "sent": 1e308, "speed": 1e308 });
        for other in [
            json!({ "sent": 1e300, "seconds": 0 }),
            json!({ "start": 1e308, "seconds": 1e308 }),
            json!({ "speed": 1.7e308 }),
        ] {
            let line = json!({ "simulated": true, "outcome": { "rounds": [other, round] } });
            let html = Figures::read(&line.to_string()).unwrap().page();
            assert!(!html.contains("NaN") && !html.contains("inf"), "{other}");
        }
        let many: Map<String, Value> = (0..60).map(|at| (name(at), name(at).into())).collect();
        let mut many = many;
        many.insert("simulated".to_owned(), true.into());
        let lines = format!("{}\n", Value::Object(many)).repeat(20);
        let html = Figures::read(&lines).unwrap().page();
        assert!(html.len() < 500 << 10, "{} KiB", html.len() >> 10);
        let outcome = json!({ "rounds": vec![round; 2_000], "total": -1.0, "reason": name(1) });
        let line = json!({ "simulated": true, "case": name(2), "outcome": outcome });
        let short = json!({ "simulated": true, "case": name(3), "outcome": { "reason": name(4) } });
        let lines = format!("{line}\n").repeat(14) + &format!("{short}\n").repeat(1_000);
        let html = Figures::read(&lines).unwrap().page();
        assert!(html.len() < 500 << 10, "{} KiB", html.len() >> 10);
    }
}
