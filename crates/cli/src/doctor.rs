//! `godwit doctor`: what stands against migrations, found out by trying, with the cure.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use godwit_control::client;
use godwit_doctor::{Finding, Guest, MAY_GOVERN, Verdict, host, there, worst};
use godwit_engine::address::Address;
use godwit_engine::facts;
use godwit_engine::measure::{Measured, measure};
use godwit_engine::security::DEFAULT_KEYS;
use godwit_engine::source::{Inquiry, Options, Trial, inquire, inquire_host};
use godwit_engine::vm::SourceVm;
use godwit_engine::{Cancel, EngineError};
use godwit_memory::RamBlock;
use godwit_qemu::{ListedDisk, QemuSource, StateBy};
use godwit_units::{ByteCount, PAGE_SIZE, Rate, format_duration};
use serde_json::{Value, json};

use crate::layout;
use crate::output::{self, json_line};
use crate::process::{self, CANCELLED, FAILED};
use crate::security::{SecurityArguments, default_keys};
use crate::vm::VmName;

/// How long a VM's writes are tracked.
const TIME: Duration = Duration::from_millis(500);
/// How long a connection is tried.
const TRIAL: Duration = Duration::from_secs(1);
/// Clocks that are further apart than this many seconds make certificates invalid too early or too
/// late, and logs hard to read.
const APART: f64 = 5.0;

/// Find out what stands against migrations, by trying, and say what to do about it.
///
/// What godwit needs of this host's kernel is tried on a process that is started for it: its memory
/// is read from outside, its writes are tracked and governed. With --vm a VM is looked at, and
/// tracked for half a second, which costs it about what a migration costs it while copying. With
/// --to the destination is asked what memory, huge pages and processors its host has, what one
/// connection carries is tried for a second, and the destination goes on waiting; with both, it is
/// asked whether the guest fits as well, as `godwit migrate` would ask.
///
/// Exit codes: 0 good, also with notes · 1 something is bad, migrations would be refused or fail ·
/// 2 wrong usage · 130 cancelled.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// A VM of this host, as for `godwit migrate`
    #[arg(long, value_name = "VM")]
    vm: Option<VmName>,

    /// Where `godwit receive` waits for its guest
    #[arg(long, value_name = "ADDR")]
    to: Option<Address>,

    #[command(flatten)]
    security: SecurityArguments,

    /// Disks are on shared storage, as for `godwit migrate`
    #[arg(long, requires_all = ["to", "vm"])]
    disks_are_shared: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Findings about one thing.
struct Section {
    about: &'static str,
    name: String,
    findings: Vec<Finding>,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> ExitCode {
    let cancel = process::cancel_on_signals();
    let (mut sections, mut vm) = (Vec::new(), None);
    let width = layout::width(&io::stdout());
    let mut tell = |section: Section| {
        if !arguments.json {
            print!("{}", as_text(&section, width));
        }
        sections.push(section);
    };
    tell(Section { about: "host", name: "this host".to_owned(), findings: of_host() });
    if let Some(name) = arguments.vm.as_ref().filter(|_| !cancel.is_cancelled()) {
        let (findings, found) = of_vm(name, arguments, &cancel);
        tell(Section { about: "vm", name: name.to_string(), findings });
        vm = found;
    }
    if let Some(to) = arguments.to.as_ref().filter(|_| !cancel.is_cancelled()) {
        let findings = of_destination(vm, to, &arguments.security, &cancel);
        tell(Section { about: "destination", name: to.to_string(), findings });
    }
    if cancel.is_cancelled() {
        output::refusal(&EngineError::Cancelled, arguments.json);
        return ExitCode::from(CANCELLED);
    }
    let worst = sections.iter().map(|section| worst(&section.findings)).max();
    let worst = worst.unwrap_or(Verdict::Good);
    if arguments.json {
        let all: Vec<Value> = sections.iter().flat_map(as_json).collect();
        json_line(&json!({ "verdict": worst.word(), "findings": all }));
    } else {
        println!("{}", layout::wrap("", in_words(worst), 0, width));
    }
    if worst == Verdict::Bad { ExitCode::from(FAILED) } else { ExitCode::SUCCESS }
}

/// Is what things are tried on, until this process's parent has tried them.
pub(crate) fn subject() -> ExitCode {
    match godwit_doctor::stand(io::stdin().lock(), io::stdout()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::from(FAILED),
    }
}

fn in_words(worst: Verdict) -> &'static str {
    match worst {
        Verdict::Good => "all is as it should be",
        Verdict::Note => "nothing stands against migrations; see the notes",
        Verdict::Bad => "migrations would be refused or fail: see what is bad",
    }
}

fn of_host() -> Vec<Finding> {
    let keys = default_keys().unwrap_or_else(|| PathBuf::from(DEFAULT_KEYS));
    match std::env::current_exe() {
        Ok(program) => host(&program, &keys),
        Err(error) => vec![Finding::bad(
            "page tables",
            format!("could not be tried: {error}"),
            "mount proc on /proc: godwit starts itself by /proc/self/exe",
        )],
    }
}

/// What there is to say of a VM; and the VM, where a destination can be asked about it.
fn of_vm(
    name: &VmName,
    arguments: &Arguments,
    cancel: &Cancel,
) -> (Vec<Finding>, Option<QemuSource>) {
    if let VmName::Microvm(path) = name {
        let mut findings = of_microvm(path, cancel);
        findings.extend(arguments.to.as_ref().map(|_| {
            let text = "whether it would take the guest of a microvm is not asked";
            let cure = "begin the migration: it asks before all else, and a guest that is refused \
                        runs on here";
            Finding::note("destination", text, cure)
        }));
        return (findings, None);
    }
    let mut vm = match name.source() {
        Ok(vm) => vm,
        Err(error) => return (vec![Finding::bad("VM", error.to_string(), REACHED)], None),
    };
    if arguments.disks_are_shared {
        vm = vm.sharing_disks();
    }
    let mut findings = vec![of_qemu(&vm)];
    match vm.devices() {
        Ok(devices) if devices.is_empty() => {
            findings.push(Finding::good("devices", "only those that the machine type has"));
        }
        Ok(devices) => findings.extend(
            devices.iter().map(|device| Finding::good("device", format!("{device} can move"))),
        ),
        Err(error) => findings.push(Finding::bad("devices", error.to_string(), ANSWERS)),
    }
    match vm.disk_list() {
        Ok(disks) if disks.is_empty() => findings.push(Finding::good("disks", "none")),
        Ok(disks) => findings.extend(disks.iter().map(of_disk)),
        Err(error) => findings.push(Finding::bad("disks", error.to_string(), ANSWERS)),
    }
    match vm.reporting().map(|reporting| reporting.cure()) {
        Ok(None) => {
            findings.push(Finding::good("free memory", "the guest tells of it: it is not sent"));
        }
        Ok(Some(cure)) => {
            let text = "what the guest has freed is sent: it does not tell of it";
            findings.push(Finding::note("free memory", text, cure));
        }
        Err(error) => findings.push(Finding::bad("free memory", error.to_string(), ANSWERS)),
    }
    let cannot =
        if vm.ram().iter().any(RamBlock::has_huge_pages) { SMALL_PAGES } else { MAY_GOVERN };
    match measure(&mut vm, TIME, cancel) {
        Ok(measured) => findings.extend(of_writes(&measured, cannot)),
        Err(error) => findings.push(Finding::bad("tracking", error.to_string(), TRACKED)),
    }
    (findings, Some(vm))
}

/// What to do about a VM that cannot be looked at.
const REACHED: &str = "see what runs here and could move (`godwit list`), and name that, as its \
                       user or as root";
/// What to do about a microvm that cannot be looked at.
const CONTROLLED: &str = "name the --control socket of a machine that runs here (`godwit list` has \
                          them), as its user or as root";
/// What to do about a monitor that does not answer.
const ANSWERS: &str = "see whether QEMU answers its monitor at all, and who else uses it";
/// What to do where a VM's writes cannot be tracked.
const TRACKED: &str =
    "mend what is bad about this host, let nobody else trace the VM, and ask again";
/// The cure where huge pages of hugetlbfs cannot be governed.
const SMALL_PAGES: &str = "start the guest with memory on a tmpfs or in a memfd without huge pages";
/// The cure where a microvm's tracker cannot govern.
const PAGE_TABLES: &str =
    "start its machine with --tracker pagemap: one that runs keeps its tracker";

/// What there is to say of the microvm at `path`.
fn of_microvm(path: &Path, cancel: &Cancel) -> Vec<Finding> {
    let status = match client::status(path) {
        Ok(status) => status,
        Err(error) => return vec![Finding::bad("VM", error.to_string(), CONTROLLED)],
    };
    let text = format!("the machine is {}", status.state);
    if let Some(cure) = cure_of_state(&status.state) {
        return vec![Finding::bad("VM", text, cure)];
    }
    let found = Finding::good("VM", format!("{text}; its writes are seen by {}", status.tracker));
    let seen = match client::measure(path, TIME, cancel) {
        Ok(measured) => of_writes(&measured, PAGE_TABLES),
        Err(error) => vec![Finding::bad("tracking", error.to_string(), TRACKED)],
    };
    std::iter::once(found).chain(seen).collect()
}

/// What to do about a microvm in `state`; nothing where it has its guest for itself.
fn cure_of_state(state: &str) -> Option<&'static str> {
    match state {
        "running" | "paused" => None,
        "incoming" => Some("name the machine that the guest is in: this one waits for one"),
        "gone" => Some("end it by `godwit microvm quit`: its guest runs elsewhere"),
        "in-doubt" => Some(
            "see whether the guest runs at the destination: if so end this machine by `godwit \
             microvm quit`, if not end the one there, and `godwit microvm resume --force`",
        ),
        "follows" | "lacks-pages" => {
            Some("wait until all of its memory has come (`godwit microvm status`), and ask again")
        }
        "lost" => Some("end it by `godwit microvm quit`: a part of its guest is lost"),
        _ => Some(
            "wait until that is over (`godwit microvm status`), or cancel it if it is a migration \
             (`godwit cancel`), and ask again",
        ),
    }
}

/// How the host caches it matters to a guest that counts on what it has flushed.
fn of_disk(disk: &ListedDisk) -> Finding {
    let ListedDisk { name, size, file, cache, .. } = disk;
    let text = format!("'{name}' ({size}), cache={cache}: {file}");
    if *cache == "unsafe" {
        let cure = "any other cache=: what the guest has flushed is lost with its host";
        return Finding::note("disk", text, cure);
    }
    Finding::good("disk", text)
}

fn of_qemu(vm: &QemuSource) -> Finding {
    let (major, minor, micro) = vm.version();
    let by = match vm.state_by() {
        StateBy::Migration => "RAM in shared files",
        StateBy::Saving => "RAM of its own",
    };
    let text = format!(
        "QEMU {major}.{minor}.{micro} with {by}; its memory is written by {}",
        vm.writers().join(", ")
    );
    Finding::good("VM", text)
}

/// What a look at its writes has shown; `cannot` is the cure where they cannot be governed.
fn of_writes(measured: &Measured, cannot: &str) -> Vec<Finding> {
    let (seconds, pages) = measured.dirty.last().copied().unwrap_or((1.0, 0));
    let rate = pages as f64 * PAGE_SIZE as f64 / seconds.max(1e-3);
    let text = format!(
        "{} of memory, {} with data; {} over {}",
        ByteCount(measured.memory_bytes),
        ByteCount(measured.data_bytes),
        Rate::from_bytes_per_second(rate),
        format_duration(Duration::try_from_secs_f64(seconds).unwrap_or_default()),
    );
    let governed = match measured.can_govern {
        true => Finding::good("governor", "a guest that outruns the link has its writes governed"),
        false => Finding::note(
            "governor",
            "a guest that outruns the link has its processors throttled, not its writes governed",
            cannot,
        ),
    };
    vec![Finding::good("tracking", text), governed]
}

fn of_destination(
    mut vm: Option<QemuSource>,
    to: &Address,
    security: &SecurityArguments,
    cancel: &Cancel,
) -> Vec<Finding> {
    let asked = security.wish().source(to).and_then(|security| {
        let options = Options { security, ..Options::new(to.clone()) };
        match &mut vm {
            Some(vm) => inquire(vm, &options, Some(TRIAL), cancel),
            None => inquire_host(&options, Some(TRIAL), cancel),
        }
    });
    match asked {
        Ok(Inquiry { refusal, round_trip, trial, facts }) => {
            let mut findings = of_network(round_trip, trial);
            let guest = vm.as_ref().map(needs);
            findings.extend(there(facts.as_ref(), &facts::of_this_host(), guest.as_ref()));
            findings.extend(vm.map(|_| match refusal {
                None => Finding::good("guest", "fits there, and would be accepted"),
                Some(why) => Finding::bad("guest", format!("would be refused: {why}"), FITTING),
            }));
            findings
        }
        Err(error) => vec![Finding::bad("destination", error.to_string(), WAITING)],
    }
}

/// What to do about a destination that would refuse the guest.
const FITTING: &str = "have a VM wait there that is as the guest's is here, or choose another host";
/// What to do about a destination that cannot be asked.
const WAITING: &str = "start `godwit receive` there, with a port that is open to this host and \
                       keys of the same authority";

/// What the guest of `vm` may come to use, in which pages.
fn needs(vm: &QemuSource) -> Guest {
    let mut guest = Guest::default();
    for block in vm.ram().iter() {
        let bytes = block.pages().bytes();
        let Some(size) = block.huge_page() else {
            guest.memory = ByteCount(guest.memory.0 + bytes.0);
            continue;
        };
        match guest.huge_pages.iter_mut().find(|(known, _)| *known == size) {
            Some((_, sum)) => sum.0 += bytes.0,
            None => guest.huge_pages.push((size, bytes)),
        }
    }
    guest
}

fn of_network(round_trip: Duration, trial: Option<Trial>) -> Vec<Finding> {
    let round_trip = format_duration(round_trip);
    let Some(trial) = trial else {
        let text = format!("{round_trip} for a round trip; what it carries was not tried");
        return vec![Finding::good("network", text)];
    };
    let rate = trial.rate();
    let text = format!("{round_trip} for a round trip; one connection carries {rate}");
    let apart = trial.clock_ahead;
    let time = format_duration(Duration::try_from_secs_f64(apart.abs()).unwrap_or_default());
    let clocks = if apart.abs() < APART {
        Finding::good("clocks", format!("{time} apart"))
    } else {
        let order = if apart > 0.0 { "ahead of" } else { "behind" };
        let text = format!("the destination's is {time} {order} this host's");
        Finding::note("clocks", text, "have both set by NTP: certificates and logs go by them")
    };
    vec![Finding::good("network", text), clocks]
}

fn as_json(section: &Section) -> Vec<Value> {
    let one = |finding: &Finding| {
        json!({
            "about": section.about,
            "name": section.name,
            "what": finding.what,
            "verdict": finding.verdict.word(),
            "text": finding.text,
            "cure": finding.cure,
        })
    };
    section.findings.iter().map(one).collect()
}

fn as_text(section: &Section, width: usize) -> String {
    let widest = section.findings.iter().map(|finding| finding.what.len()).max().unwrap_or(0);
    let mut text = format!("{}\n", layout::wrap("", &section.name, 2, width));
    for Finding { what, verdict, text: found, cure } in &section.findings {
        let word = verdict.word();
        let label = format!("  {word}  {what:<widest$}  ");
        let indent = label.len();
        text += &layout::wrap(&label, found, indent, width);
        text.push('\n');
        if let Some(cure) = cure {
            let label = format!("{}cure: ", " ".repeat(indent));
            text += &layout::wrap(&label, cure, indent + 6, width);
            text.push('\n');
        }
    }
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_microvm_in_any_state_but_with_its_guest_is_told_what_to_do_about_it() {
        // All states of `godwit_control::messages::Status`. Mutation: one is tracked all the same.
        let others = [
            "incoming",
            "leaving",
            "arriving",
            "plugging",
            "gone",
            "in-doubt",
            "follows",
            "lacks-pages",
            "lost",
        ];
        assert_eq!(others.map(|state| cure_of_state(state).is_some()), [true; 9]);
        let of = |state| cure_of_state(state).unwrap_or_default();
        assert!(of("leaving").contains("godwit cancel"));
        // A guest that runs at the other side is not called back.
        assert!(
            ["follows", "lacks-pages", "gone", "lost"].iter().all(|it| !of(it).contains("cancel"))
        );
        assert_eq!(["running", "paused"].map(cure_of_state), [None; 2]);
        // A guest that may run elsewhere is not run without a look there.
        let in_doubt = cure_of_state("in-doubt").unwrap_or_default();
        assert!(
            in_doubt.starts_with("see whether the guest runs at the destination"),
            "{in_doubt}"
        );
    }
}
