//! What an evacuation prints: the plan, each step, how far it is, and the end; for people, or lines
//! of JSON for programs.

use std::time::Duration;

use godwit_evacuate::{Event, Plan, PlannedVm, Receiver, Report};
use godwit_fleet::{Evacuation, NoFaults, Place, run as run_virtually};
use godwit_units::{ByteCount, Rate, TypedRate, format_duration};
use serde_json::{Value, json};

use crate::layout::{self, Column};
use crate::output::json_line;
use crate::say;

/// What is planned for a VM.
struct Planned<'a> {
    vm: &'a PlannedVm,
    to: Option<String>,
    /// When its move begins and ends, in seconds.
    times: Option<(f64, f64)>,
    /// Why it stays.
    why: Option<String>,
    /// By what it is taken in.
    receiver: Option<&'a Receiver>,
}

/// Where each VM would go, and when.
pub(super) fn plan(plan: &Plan, json: bool) {
    let (vms, destinations, source) = plan.inventory();
    let mut evacuation = Evacuation::new(vms, destinations, vec![source]);
    let first = evacuation.places().to_vec();
    let ran = run_virtually(&mut evacuation, &mut NoFaults);
    let planned = |((vm, place), times): ((_, &Place), &Option<(f64, f64)>)| {
        let vm: &PlannedVm = vm;
        let (to, why) = match place {
            Place::Waiting { to } => (Some(plan.destinations[*to].name.clone()), None),
            Place::Stays(godwit_fleet::Stays::Unplaced(why)) => (None, Some(why.to_string())),
            _ => (None, None),
        };
        let receiver = to.as_ref().and_then(|to| vm.receivers.get(to));
        Planned { vm, times: to.as_ref().and(*times), to, why, receiver }
    };
    let rows: Vec<Planned<'_>> = plan.vms.iter().zip(&first).zip(&ran.times).map(planned).collect();
    if json {
        let vms: Vec<Value> = rows.iter().map(|row| planned_json(plan, row)).collect();
        json_line(&json!({ "outcome": "planned", "seconds": ran.seconds, "vms": vms }));
        return;
    }
    print!("{}", planned_text(plan, &rows, layout::width(&std::io::stdout())));
}

fn planned_json(plan: &Plan, row: &Planned<'_>) -> Value {
    let (begins, ends) = row.times.unzip();
    let moving: Vec<&str> = plan.moving_disks(row.vm).map(|(name, _)| name).collect();
    json!({
        "name": row.vm.name,
        "vm": row.vm.vm,
        "memory_bytes": row.vm.memory_bytes,
        "cpu": row.vm.cpu,
        "disk_bytes": row.vm.disks,
        "moving_disks": moving,
        "to": row.to,
        "receiver": row.receiver,
        "begins_s": begins,
        "ends_s": ends,
        "why": row.why,
    })
}

fn planned_text(plan: &Plan, rows: &[Planned<'_>], width: usize) -> String {
    let columns = [
        Column::words("VM", 0),
        Column::words("to", 0),
        Column::number("begins", 1),
        Column::number("ends", 1),
        Column::number("memory", 2),
        Column::words("CPU", 4),
        Column::words("disks", 3),
    ];
    let time =
        |seconds: Option<f64>| seconds.map_or("-".to_owned(), |seconds| format!("{seconds:.1} s"));
    let disks = |vm: &PlannedVm| {
        let moving: Vec<&str> = plan.moving_disks(vm).map(|(name, _)| name).collect();
        let word = |(name, bytes): (&String, &u64)| {
            let stays = if moving.contains(&name.as_str()) { "" } else { " stays" };
            format!("{name} {}{stays}", ByteCount(*bytes))
        };
        let words: Vec<String> = vm.disks.iter().map(word).collect();
        if words.is_empty() { "-".to_owned() } else { words.join(", ") }
    };
    let cells = |row: &Planned<'_>| {
        let (begins, ends) = row.times.unzip();
        vec![
            row.vm.name.clone(),
            row.to.clone().unwrap_or_else(|| "stays".to_owned()),
            time(begins),
            time(ends),
            ByteCount(row.vm.memory_bytes).to_string(),
            say::line(row.vm.cpu.as_deref().unwrap_or("-")),
            say::line(disks(row.vm)),
        ]
    };
    let cells: Vec<Vec<String>> = rows.iter().map(cells).collect();
    let mut text = layout::table(&columns, &cells, 0, width);
    for row in rows {
        let words = match (&row.why, row.receiver) {
            (Some(why), _) => why.clone(),
            (None, Some(Receiver::Starts { start })) => format!("taken in by {}", start.join(" ")),
            _ => continue,
        };
        text += &format!("{}\n", layout::wrap(&format!("{}: ", row.vm.name), &words, 4, width));
    }
    text
}

/// What begins now.
pub(super) fn heading(plan: &Plan) {
    let forecast = Duration::from_secs_f64(plan.forecast_seconds.clamp(0.0, 1e9));
    println!(
        "{} VMs, {} at once, {} for all of them; forecast: {}",
        plan.vms.len(),
        plan.at_once,
        Rate::from_bytes_per_second(plan.bytes_per_second),
        format_duration(forecast)
    );
}

/// Other limits than before.
pub(super) fn limits((budget, at_once): &(Rate, u32), json: bool) {
    let bytes_per_second = budget.bytes_per_second();
    if json {
        json_line(&json!({
            "event": "limited",
            "budget_bytes_per_second": bytes_per_second,
            "at_once": at_once,
        }));
    } else {
        let now = json!({ "budget_bytes_per_second": bytes_per_second, "at_once": at_once });
        println!("the budget is now {}", self::budget(&now));
    }
}

/// The limits in force, by what the evacuation says of itself.
pub(super) fn budget(report: &Value) -> String {
    let rate =
        Rate::from_bytes_per_second(report["budget_bytes_per_second"].as_f64().unwrap_or(0.0));
    format!("{} for {} moves at once", TypedRate::from(rate).both(), report["at_once"])
}

/// What a request has come to, before how many VMs are where; nothing of one for the status.
pub(super) fn asked(request: &str, answer: &Value) -> String {
    match request {
        "pause" => "no further move begins. ".to_owned(),
        "continue" => "it goes on. ".to_owned(),
        "cancel" => "its moves are being cancelled. ".to_owned(),
        "status" => String::new(),
        _ => format!("now {}. ", budget(answer)),
    }
}

/// How many VMs are where, by what the evacuation says of itself.
pub(super) fn counts(report: &Value) -> String {
    let count = |state: &str| {
        let vms = report["vms"].as_array().into_iter().flatten();
        vms.filter(|vm| vm["state"] == state).count()
    };
    format!(
        "{} moved, {} on their way, {} wait, {} stay, {} for an operator",
        count("moved"),
        count("moving"),
        count("waiting"),
        count("stayed"),
        count("in-doubt")
    )
}

/// Something that is no step of a VM's.
pub(super) fn note(event: &str, text: &str, json: bool) {
    if json {
        json_line(&json!({ "event": event, "why": text }));
    } else {
        println!("{}", say::line(text));
    }
}

/// Whether the host is reached by the command `on`; if not, why.
pub(super) fn reached(on: &str, trouble: Option<&str>, json: bool) {
    let Some(why) = trouble else {
        return note("reached", "the host is reached again", json);
    };
    let text = format!("the host is not reached, and is waited for: --on '{on}': {why}");
    note("unreached", &text, json);
}

/// What has happened.
pub(super) fn events(plan: &Plan, events: &[Event], json: bool) {
    for event in events {
        let (name, to, word, more) = match event {
            Event::Began { vm, to, rate } => (vm, Some(to), "began", Some(rate.to_string())),
            Event::Found { vm, to } => (vm, Some(to), "found", None),
            Event::Moved { vm, to } => (vm, Some(to), "moved", None),
            Event::Failed { vm, why, again } => {
                (vm, None, if *again { "failed" } else { "stays" }, Some(why.clone()))
            }
            Event::Operator { vm, why } => (vm, None, "in-doubt", Some(why.clone())),
        };
        let name = &plan.vms[*name].name;
        let to = to.map(|to| plan.destinations[*to].name.as_str());
        if json {
            json_line(&json!({ "event": word, "vm": name, "to": to, "why": more }));
            continue;
        }
        let to = to.map_or_else(String::new, |to| format!(" to {to}"));
        let words = match word {
            "began" => "begins to move",
            "found" => "is on its way",
            "moved" => "has moved",
            "failed" => "did not move, and is tried again",
            "stays" => "stays",
            _ => "needs an operator",
        };
        let more = more.map_or_else(String::new, |more| match word {
            "began" => format!(" at {more}"),
            _ => format!(": {more}"),
        });
        println!("{name} {words}{to}{}", say::line(more));
    }
}

/// How far it is, in a line.
pub(super) fn news(report: &Report) {
    println!("{}", counts(&as_json(report)));
}

/// What the evacuation says of itself.
pub(super) fn as_json(report: &Report) -> Value {
    serde_json::to_value(report).unwrap_or_default()
}

/// What is kept of an evacuation, and printed for programs.
pub(super) fn whole_report(plan: &Plan, report: &Report, took: Duration, cancelled: bool) -> Value {
    let mut whole = json!({
        "outcome": if cancelled { "cancelled" } else { "evacuated" },
        "began_ms": plan.began_ms,
        "took_seconds": took.as_secs_f64(),
        "forecast_seconds": plan.forecast_seconds,
    });
    if let (Value::Object(whole), Value::Object(rest)) = (&mut whole, as_json(report)) {
        whole.extend(rest);
    }
    whole
}

/// What became of each VM, and of all of them.
pub(super) fn ended_text(whole: &Value, width: usize) -> String {
    let columns = [
        Column::words("VM", 0),
        Column::words("state", 0),
        Column::words("to", 0),
        Column::number("moves", 1),
    ];
    let word = |value: &Value| say::line(value.as_str().unwrap_or("-"));
    let vms = || whole["vms"].as_array().into_iter().flatten();
    let cells = |vm: &Value| {
        vec![word(&vm["name"]), word(&vm["state"]), word(&vm["to"]), vm["attempts"].to_string()]
    };
    let rows: Vec<Vec<String>> = vms().map(cells).collect();
    let mut text = layout::table(&columns, &rows, 0, width);
    for vm in vms().filter(|vm| vm["state"] != "moved") {
        if let Some(why) = vm["why"].as_str() {
            let label = format!("{}: ", word(&vm["name"]));
            text += &format!("{}\n", layout::wrap(&label, &say::line(why).to_string(), 4, width));
        }
    }
    let time = |key: &str| {
        let seconds = whole[key].as_f64().unwrap_or_default().clamp(0.0, 1e9);
        format_duration(Duration::from_secs_f64(seconds))
    };
    text += &format!(
        "{} of {} moved in {} (forecast {}), {} where they were, {} for an operator\n",
        whole["moved"],
        vms().count(),
        time("took_seconds"),
        time("forecast_seconds"),
        whole["stayed"],
        whole["in_doubt"]
    );
    text
}
