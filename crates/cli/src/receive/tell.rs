//! What `godwit receive` tells while it takes a guest in, and of one that is here: lines for people
//! on standard error, the result on standard output; with `--json` all as lines of JSON there.

use std::time::Duration;

use godwit_control::messages::Cost;
use godwit_engine::destination::{DumpStage, Dumped, Fetched, Notice, Received};
use godwit_engine::limits;
use godwit_units::{ByteCount, PAGE_SIZE, PageRun, format_duration};
use serde_json::{Value, json};

use crate::layout;
use crate::output::json_line;
use crate::say;

/// `allowed`: whether disks may be overwritten.
pub(super) fn tell_notice(notice: &Notice, allowed: bool, json: bool) {
    if json && let Some(event) = as_json(notice) {
        json_line(&event);
        return;
    }
    match notice {
        // On standard error in any case: somebody knocks who should not.
        Notice::Refused(why) => {
            let why = say::line(why);
            eprintln!("godwit: refused a connection: {why}; still waiting");
        }
        Notice::Busy { peer } => {
            eprintln!(
                "godwit: another source came, from {peer}; it was told that this receive is busy"
            );
        }
        Notice::Asked { peer, refusal: None } => {
            eprintln!("{peer} asked whether its guest fits: it does; still waiting");
        }
        Notice::Asked { peer, refusal: Some(why) } => {
            let why = say::line(why);
            eprintln!("{peer} asked whether its guest fits: it does not: {why}; still waiting");
        }
        Notice::Looked { peer } => {
            eprintln!("{peer} asked what this host has, and was told; still waiting");
        }
        Notice::Accepted { ram, disks, .. } => {
            let disks: String = disks
                .iter()
                .map(|disk| format!(", {} of disk '{}'", disk.size, say::line(&disk.name)))
                .collect();
            eprintln!("a source has connected: {ram} of RAM{disks} to come");
            if allowed && disks.is_empty() {
                eprintln!("no disk comes along: godwit migrate was started without --disks");
            }
        }
        Notice::Round { round, received } => {
            eprintln!("round {round} in place, {received} received")
        }
        Notice::Severed { why, limit: limits::ENDLESS } => eprintln!(
            "godwit: {why}; the source alone has what is missing here: it is waited for without end"
        ),
        Notice::Severed { why, limit } => {
            let limit = format_duration(*limit);
            eprintln!("godwit: {why}; what has arrived is kept for the source for {limit}");
        }
        Notice::Resumed { after } => {
            eprintln!("godwit: the source is back after {}", format_duration(*after));
        }
        Notice::Lacks { all, missing } => eprintln!("godwit: {}", lacks_words(*all, missing)),
        Notice::Copy { path, why: None } => {
            eprintln!("godwit: what is missing is taken from the copy, {}", path.display());
        }
        Notice::Copy { path, why: Some(why) } => {
            let why = say::line(why);
            eprintln!("godwit: the copy of what is missing, {}: {why}", path.display());
        }
        Notice::Fetching { left } => eprintln!("the guest runs here; {left} still to come"),
        Notice::Dumped(dumped) => eprintln!("{}", dumped_words(dumped)),
        Notice::AwaitingSource { limit, arrived } => {
            let limit = format_duration(*limit);
            let (state, word) = match arrived {
                true => ("; the guest is here", "ask for it; Ctrl-C ends the wait"),
                false => ("", "say who runs the guest"),
            };
            eprintln!(
                "godwit: the source was lost at the handover{state}; waiting up to {limit} for it \
                 to {word}"
            );
        }
    }
}

/// The event for programs, and for the record; those that are told on standard error in any case
/// are none.
pub(super) fn as_json(notice: &Notice) -> Option<Value> {
    Some(match notice {
        Notice::Refused(_) | Notice::Busy { .. } | Notice::AwaitingSource { .. } => return None,
        Notice::Asked { peer, refusal } => {
            json!({ "event": "asked", "peer": peer, "refusal": refusal })
        }
        Notice::Looked { peer } => json!({ "event": "looked", "peer": peer }),
        Notice::Accepted { ram, disks, protocol_version, features } => {
            let disks: Vec<_> = disks
                .iter()
                .map(|disk| json!({ "name": disk.name, "size_bytes": disk.size.0 }))
                .collect();
            json!({
                "event": "accepted", "ram_bytes": ram.0, "disks": disks,
                "protocol_version": protocol_version, "features": features,
            })
        }
        Notice::Round { round, received } => {
            json!({ "event": "round", "round": round, "received_bytes": received.0 })
        }
        Notice::Severed { why, limit } => {
            json!({ "event": "severed", "why": why, "limit_ms": limit.as_secs_f64() * 1e3 })
        }
        Notice::Resumed { after } => {
            json!({ "event": "resumed", "after_ms": after.as_secs_f64() * 1e3 })
        }
        Notice::Lacks { all, missing } => {
            let run = |run: &PageRun| json!([run.start.0, run.count.0]);
            let block = |(name, runs): &(String, Vec<PageRun>)| {
                let runs: Vec<Value> = runs.iter().map(run).collect();
                json!({ "block": name, "runs": runs })
            };
            let missing: Vec<_> = missing.iter().map(block).collect();
            json!({ "event": "lacks", "left_bytes": all.0, "missing": missing })
        }
        Notice::Copy { path, why } => {
            json!({ "event": "copy", "path": path.to_string_lossy(), "why": why })
        }
        Notice::Fetching { left } => json!({ "event": "fetching", "left_bytes": left.0 }),
        Notice::Dumped(Dumped { stage, files, data, changed, first }) => {
            let first = first.as_ref().map(|(block, offset)| json!([block, offset]));
            json!({
                "event": "dumped", "stage": stage.to_string(), "files": files,
                "data_bytes": data.0, "changed_pages": changed.0, "first": first,
            })
        }
    })
}

/// Which pages are missing: how many, and where the first of them are.
fn lacks_words(all: ByteCount, missing: &[(String, Vec<PageRun>)]) -> String {
    const SHOWN: usize = 4;
    let runs = || missing.iter().flat_map(|(name, runs)| runs.iter().map(move |run| (name, run)));
    let place = |(name, run): (&String, &PageRun)| {
        let (start, end) = (run.start.0 * PAGE_SIZE, run.end().0 * PAGE_SIZE);
        format!("{start:#x} to {end:#x} of {}", say::line(name))
    };
    let places: Vec<String> = runs().take(SHOWN).map(place).collect();
    let more = match runs().count().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!(", and {more} places more"),
    };
    format!("{all} of its memory is missing here: {}{more}", places.join(", "))
}

/// A dump, and what it shows.
fn dumped_words(dumped: &Dumped) -> String {
    let Dumped { stage, files, data, changed, first } = dumped;
    let files: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
    let mut words = match stage {
        DumpStage::Arrived => format!("all memory is here: {data} dumped to {}", files.join(", ")),
        DumpStage::Loaded => {
            format!("device state is loaded: {data} dumped to {}", files.join(", "))
        }
    };
    if *stage == DumpStage::Loaded {
        words += "; ";
        words += &match first {
            None => "no page differs from the dump before".to_owned(),
            Some((block, offset)) => format!(
                "the machine has written {} pages meanwhile, the first at {offset:#x} of {block}",
                changed.0
            ),
        };
    }
    words
}

/// The last line for programs, and of the record, of a guest that is here.
pub(super) fn last_line(received: &Received, cost: Cost) -> Value {
    json!({
        "outcome": if received.running { "running" } else { "paused" },
        "received_bytes": received.bytes.0,
        "total_ms": received.total.as_secs_f64() * 1e3,
        "load_ms": received.load.as_secs_f64() * 1e3,
        "resume_ms": received.resume.as_secs_f64() * 1e3,
        "late_packets": received.late_packets,
        "disks_to_ready_ms": received.disks_to_ready.map(|time| time.as_secs_f64() * 1e3),
        "verified": received.verified,
        "fetched": received.fetched.as_ref().map(fetched_json),
        "cpu_ms": cost.cpu_ms,
        "peak_rss_bytes": cost.peak_rss_bytes,
    })
}

/// Tells people of a guest that is here.
pub(super) fn tell(received: &Received, Cost { cpu_ms, .. }: Cost) {
    let how = if received.running { "runs here" } else { "is here, paused as it was" };
    let mut text = format!(
        "{} received in {}, device state loaded in {}, resumed in {}, {cpu_ms:.0} ms CPU",
        received.bytes,
        format_duration(received.total),
        format_duration(received.load),
        format_duration(received.resume),
    );
    if let Some(fetched) = &received.fetched {
        text += &format!(
            "; {} came when it ran here, within {}: {} pages were waited for, half of them for no \
             longer than {}, 99 % for {}, the longest {}",
            fetched.missing.bytes(),
            format_duration(fetched.time),
            fetched.faults,
            format_duration(fetched.median_wait),
            format_duration(fetched.p99_wait),
            format_duration(fetched.longest_wait),
        );
    }
    let label = format!("the guest {how}: ");
    println!("{}", layout::wrap(&label, &text, 10, layout::width(&std::io::stdout())));
}

/// What came when the guest ran here already.
fn fetched_json(fetched: &Fetched) -> Value {
    let micros = |time: Duration| time.as_secs_f64() * 1e6;
    json!({
        "missing_bytes": fetched.missing.bytes().0,
        "faults": fetched.faults,
        "discarded_pages": fetched.discarded,
        "median_wait_us": micros(fetched.median_wait),
        "p99_wait_us": micros(fetched.p99_wait),
        "longest_wait_us": micros(fetched.longest_wait),
        "time_ms": fetched.time.as_secs_f64() * 1e3,
    })
}

#[cfg(test)]
mod tests {
    use godwit_units::PageCount;

    use super::*;

    #[test]
    fn what_is_missing_is_told_by_how_much_it_is_and_the_first_places() {
        let ram = |runs: &[PageRun]| ("pc.ram".to_owned(), runs.to_vec());
        let one = [ram(&[PageRun::new(16, 2)])];
        let told = "8KiB of its memory is missing here: 0x10000 to 0x12000 of pc.ram";
        assert_eq!(lacks_words(PageCount(2).bytes(), &one), told);
        let many: Vec<PageRun> = (0..6).map(|at| PageRun::new(2 * at, 1)).collect();
        let told = lacks_words(PageCount(6).bytes(), &[ram(&many)]);
        assert!(told.ends_with("0x6000 to 0x7000 of pc.ram, and 2 places more"), "{told}");
    }
}
