//! `godwit-demo`: the main job on this machine, with witnesses.
//!
//! What it says about the guest comes from outside of godwit: from the guest's own console and from
//! an observer that looks at a counter of the guest in the RAM of both sides. The migration itself
//! is the two commands, run as processes.

#![forbid(unsafe_code)]

#[macro_use]
extern crate godwit_terminal;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use clap::{Parser, ValueEnum};
use godwit_engine::report::Progress;
use godwit_stamp::settings::Mode;
use godwit_terminal::layout;
use godwit_terminal::output::{self, json_line};
use godwit_terminal::process::{CANCELLED, FAILED, cancel_on_signals};
use godwit_terminal::progress::Table;
use godwit_testbed::{
    Backend, BeaconPlace, Beat, Godwit, GuestConfig, GuestRam, MicroVm, Movable, Observer,
    QemuBuild, Running, TestVm, VmConfig, builds, end_children, longest_pause,
};
use godwit_units::{ByteCount, GRAMMAR, TypedRate, format_duration};
use serde_json::{Value, json};

/// A guest under emulation boots in seconds; a machine under load takes longer.
const BOOT_LIMIT: Duration = Duration::from_secs(180);
const MIGRATION_LIMIT: Duration = Duration::from_secs(300);
/// Heartbeats, ten a second, before and after that are looked at.
const BEATS: usize = 10;
/// Before each line of the migration's own.
const INDENT: &str = "  ";

/// Show it: two VMs on this machine, a guest that checks itself, and a migration between them.
///
/// The guest stamps its memory, re-reads and checks it all the time and says BUG if anything is
/// wrong. The VMs are QEMUs, with a Linux guest under emulation (`make demo` provides both) or with
/// a small guest on KVM, or, where there is no QEMU, microvms, which need only /dev/kvm.
#[derive(Debug, Parser)]
#[command(name = "godwit-demo", version, max_term_width = 80, after_help = GRAMMAR)]
struct Arguments {
    /// The kind of VM [default: qemu if there is one, else microvm]
    #[arg(long)]
    machine: Option<MachineName>,

    /// What the guest does
    #[arg(long, default_value = "rate")]
    mode: ModeName,

    /// Pages the guest writes each second in the mode `rate`
    #[arg(long, value_name = "PAGES", default_value_t = 2000)]
    rate: u64,

    /// The memory that the guest writes to
    #[arg(long, value_name = "SIZE", default_value = "128MiB")]
    working_set: ByteCount,

    /// The guest's RAM; half of it is filled
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    memory: ByteCount,

    /// The newest QEMU found, or the oldest
    #[arg(long, default_value = "newest")]
    qemu: QemuChoice,

    /// Where a QEMU has the guest's RAM [default: anonymous, file with a QEMU before 8.0, whose
    /// memory the observer does not find]
    #[arg(long)]
    ram: Option<RamName>,

    /// The most that is sent, as for `godwit migrate`
    #[arg(long, value_name = "RATE")]
    max_bandwidth: Option<TypedRate>,

    /// Print lines of JSON; the last one is the result
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ModeName {
    /// Almost nothing
    Idle,
    /// Write so many pages a second
    Rate,
    /// Write as fast as it can
    Full,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum MachineName {
    /// A QEMU with a Linux guest under emulation
    Qemu,
    /// A QEMU with a small guest on KVM
    Kvm,
    Microvm,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum RamName {
    /// Memory of the process, as QEMU has it without a word
    Anonymous,
    /// A file without a name
    Memfd,
    /// A file on a tmpfs
    File,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum QemuChoice {
    Newest,
    Oldest,
}

fn main() -> ExitCode {
    let arguments = &Arguments::parse();
    let cancel = cancel_on_signals();
    let watched = cancel.clone();
    std::thread::spawn(move || {
        while !watched.is_cancelled() {
            std::thread::sleep(Duration::from_millis(20));
        }
        // What is waited for below ends, and everything is cleaned up on the way out.
        end_children();
    });
    match demo(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) if cancel.is_cancelled() => {
            eprintln!("godwit-demo: cancelled; both VMs have been ended");
            ExitCode::from(CANCELLED)
        }
        Err(error) => {
            eprintln!("godwit-demo: {error:#}");
            if arguments.json {
                json_line(&json!({ "outcome": "failed", "error": format!("{error:#}") }));
            }
            ExitCode::from(FAILED)
        }
    }
}

fn guest(arguments: &Arguments) -> anyhow::Result<GuestConfig> {
    const MIB: u64 = 1 << 20;
    let memory = arguments.memory.0;
    ensure!(
        memory >= 256 * MIB && memory.is_multiple_of(2 * MIB),
        "--memory {} does not do: use at least 256MiB, in steps of 2MiB",
        arguments.memory
    );
    let fill = ByteCount(memory / 2);
    ensure!(
        arguments.working_set.0 >= 4096 && arguments.working_set <= fill,
        "--working-set {} does not do: half of the RAM is filled, so use 4KiB to {fill}",
        arguments.working_set
    );
    ensure!(
        arguments.rate > 0 || !matches!(arguments.mode, ModeName::Rate),
        "--rate 0 does not do: use --mode idle"
    );
    Ok(GuestConfig {
        memory: arguments.memory,
        mode: match arguments.mode {
            ModeName::Idle => Mode::Idle,
            ModeName::Rate => Mode::Rate,
            ModeName::Full => Mode::Full,
        },
        rate: arguments.rate,
        working_set: arguments.working_set,
        fill,
        ..GuestConfig::standard()
    })
}

fn choose(choice: QemuChoice) -> anyhow::Result<QemuBuild> {
    let found = builds().into_iter();
    let chosen = match choice {
        QemuChoice::Newest => found.max_by_key(|build| build.version),
        QemuChoice::Oldest => found.min_by_key(|build| build.version),
    };
    chosen.context("there is no QEMU: run `make qemu`")
}

/// The two machines, source and destination, and what kind they are.
struct Machines {
    name: String,
    source: Box<dyn Movable>,
    destination: Box<dyn Movable>,
    /// Where their RAM is, to an observer.
    ram: [GuestRam; 2],
}

fn machines(
    arguments: &Arguments,
    godwit: &Godwit,
    say: &dyn Fn(&str),
) -> anyhow::Result<Machines> {
    let guest = guest(arguments)?;
    let size = arguments.memory;
    let choice = arguments.machine.unwrap_or_else(|| {
        if builds().is_empty() { MachineName::Microvm } else { MachineName::Qemu }
    });
    if choice != MachineName::Microvm {
        let build = choose(arguments.qemu)?;
        let usual = if build.version.0 < 8 { RamName::File } else { RamName::Anonymous };
        let (backend, ram) = match arguments.ram.unwrap_or(usual) {
            RamName::Anonymous => (Backend::Anonymous, "anonymous RAM"),
            RamName::Memfd => (Backend::Memfd, "RAM in a memfd"),
            RamName::File => (Backend::SharedFile, "RAM in a shared file"),
        };
        let mut config = VmConfig::new(&build, guest).with_backend(backend);
        let mut name = config.build.to_string();
        if choice == MachineName::Kvm {
            (config, name) = (config.on_kvm(), format!("{name} on KVM"));
        }
        say(&format!("starting a source and a destination, {size} of {ram} each: {name}"));
        let (mut source, mut destination) =
            (TestVm::source(&config)?, TestVm::destination(&config)?);
        say(match choice {
            MachineName::Kvm => "the source's guest fills and stamps half of its memory",
            _ => "booting Linux in the source; its init fills and stamps half of its memory",
        });
        let ram = [source.ram()?, destination.ram()?];
        let (source, destination) = (Box::new(source), Box::new(destination));
        return Ok(Machines { name, source, destination, ram });
    }
    if arguments.machine.is_none() {
        say("there is no QEMU here (`make qemu` installs one): using microvms instead");
    }
    say(&format!("starting a source and a destination, {size} each: microvm"));
    let bytes = |count: ByteCount| format!("{}B", count.0);
    let [memory, working_set] = [size, arguments.working_set].map(bytes);
    let rate = arguments.rate.to_string();
    let mode = guest.mode.to_string();
    let options =
        ["--memory", &memory, "--mode", &mode, "--rate", &rate, "--working-set", &working_set];
    let source = MicroVm::start(godwit, &options)?;
    let destination = MicroVm::start(godwit, &["--memory", &memory, "--incoming"])?;
    say("the source's guest fills and stamps half of its memory");
    let ram = [source.ram_file().into(), destination.ram_file().into()];
    let (source, destination) = (Box::new(source), Box::new(destination));
    Ok(Machines { name: "microvm".to_owned(), source, destination, ram })
}

fn demo(arguments: &Arguments) -> anyhow::Result<()> {
    let say = |text: &str| {
        if arguments.json {
            json_line(&json!({ "event": "note", "text": text }));
        } else {
            println!("{}", layout::wrap("", text, 4, layout::width(&std::io::stdout())));
        }
    };
    let godwit = Godwit::built()?;
    let Machines { name, source, destination, ram: [source_ram, destination_ram] } =
        machines(arguments, &godwit, &say)?;
    let (source, destination) = (&*source, &*destination);
    source.wait_ready(BOOT_LIMIT)?;
    source.wait_for_heartbeats_after(Instant::now(), BEATS + 1, BOOT_LIMIT)?;
    let place = BeaconPlace::find(source_ram.clone())?;
    let observer = Observer::start(place, source_ram, destination_ram)?;
    say("the guest is at work; its last heartbeats:");
    show_beats(&source.heartbeats(), 2, &say);

    let (receive, address) = godwit.receive(destination, &[])?;
    let limit = arguments.max_bandwidth.map(|rate| rate.to_string());
    let mut options = vec!["--verify"];
    if let Some(limit) = &limit {
        options.extend(["--max-bandwidth", limit]);
    }
    say(&format!("migrating it to {address}, digests of all memory compared at the end:"));
    let began = Instant::now();
    let migrate = godwit.migrate(source, &address, &options)?;
    follow(&migrate, arguments.json);
    let migrated = migrate.wait(MIGRATION_LIMIT)?;
    let last = migrated.last().clone();
    if last["outcome"] != "migrated" {
        bail!("the migration failed: {}", migrated.errors.trim());
    }
    let ended = Instant::now();
    let received = receive.wait(MIGRATION_LIMIT)?;

    destination.wait_for_heartbeats_after(Instant::now(), BEATS, BOOT_LIMIT)?;
    let seen = observer.finish()?;
    ensure!(!seen.ran_on_both, "the guest counted on both sides: this must never happen");
    let gap = seen.switchover.context("the guest was not seen to move")?;
    let beats = source.heartbeats_across(destination);
    let bugs = [source.bugs(), destination.bugs()].concat();
    say("the guest runs on at the destination; heartbeats across the switchover:");
    show_beats(&around(&beats, ended), 4, &say);

    let speed = Speed::of(&beats, began, ended);
    let peak_rss = last["peak_rss_bytes"].as_u64().max(received.last()["peak_rss_bytes"].as_u64());
    let cpu_ms = number(&last, "cpu_ms") + number(received.last(), "cpu_ms");
    let result = json!({
        "outcome": "migrated",
        "machine": name,
        "setup_ms": last["setup_ms"],
        "total_ms": last["total_ms"],
        "downtime_ms": last["downtime_ms"],
        "verify_ms": last["verify_ms"],
        "guest_gap_ms": gap.length.as_secs_f64() * 1e3,
        "guest_gap_resolution_ms": gap.resolution.as_secs_f64() * 1e3,
        "longest_heartbeat_gap_ms": longest_pause(&beats).as_secs_f64() * 1e3,
        "guest_speed_during": speed.during,
        "guest_speed_after": speed.after,
        "slow_ms": last["tracked_ms"],
        "sent_bytes": last["sent_bytes"],
        "rounds": last["rounds"],
        "cpu_ms": cpu_ms,
        "peak_rss_bytes": peak_rss,
        "tracking_stop_us": last["tracking_stop_us"],
        "verified": last["verified"],
        "bug": bugs.len(),
    });
    if arguments.json {
        json_line(&result);
    } else {
        summary(&result);
    }
    ensure!(bugs.is_empty(), "the guest found its memory damaged: {}", bugs.join("; "));
    ensure!(last["verified"] == true, "the digests were not compared");
    Ok(())
}

/// Shows the progress lines of `migrate` as they come.
fn follow(migrate: &Running, json: bool) {
    let (mut shown, mut headed) = (0, false);
    loop {
        let lines = migrate.lines();
        for line in &lines[shown..] {
            if json && line["event"] == "progress" {
                json_line(line);
            } else if line["round_ended"] == true
                && let Ok(progress) = serde_json::from_value::<Progress>(line.clone())
            {
                let table = Table::new(layout::width(&std::io::stdout()) - INDENT.len(), false);
                if !std::mem::replace(&mut headed, true) {
                    println!("{INDENT}{}", table.head());
                }
                println!("{INDENT}{}", table.row(&progress));
            }
        }
        shown = lines.len();
        if lines.last().is_some_and(|line| !line["outcome"].is_null()) || migrate.has_ended() {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn number(value: &Value, key: &str) -> f64 {
    value[key].as_f64().unwrap_or(0.0)
}

fn millis(ms: f64) -> String {
    format_duration(Duration::try_from_secs_f64(ms / 1e3).unwrap_or_default())
}

fn show_beats(beats: &[Beat], most: usize, say: &dyn Fn(&str)) {
    for beat in &beats[beats.len().saturating_sub(most)..] {
        say(&format!("  {}", beat.heartbeat));
    }
}

/// Two heartbeats before `moment` and two after.
fn around(beats: &[Beat], moment: Instant) -> Vec<Beat> {
    let split = beats.partition_point(|beat| beat.at <= moment);
    beats[split.saturating_sub(2)..beats.len().min(split + 2)].to_vec()
}

/// How fast the guest counted during the migration and after it, as a share of before.
struct Speed {
    during: f64,
    after: f64,
}

impl Speed {
    fn of(beats: &[Beat], began: Instant, ended: Instant) -> Self {
        let speed = |beats: &[Beat]| match beats {
            [first, .., last] => {
                let counted = last.heartbeat.count.saturating_sub(first.heartbeat.count);
                counted as f64 / last.at.duration_since(first.at).as_secs_f64()
            }
            _ => f64::NAN,
        };
        let from = beats.partition_point(|beat| beat.at < began);
        let to = beats.partition_point(|beat| beat.at <= ended);
        let before = speed(&beats[from.saturating_sub(BEATS)..from]);
        let during = speed(&beats[from.saturating_sub(1)..beats.len().min(to + 1)]);
        Self { during: during / before, after: speed(&beats[to..]) / before }
    }
}

fn summary(result: &Value) {
    let ms = |key: &str| millis(number(result, key));
    let share = |key: &str| format!("{:.0} %", number(result, key) * 100.0);
    let stopped = result["tracking_stop_us"].as_u64().filter(|us| *us > 0);
    let stopped = stopped.map(|us| format!(" (a thread of the VM was stopped for {us} us)"));
    let verified =
        if result["verified"] == true { "digests of both sides equal" } else { "NOT compared" };
    let bytes = |key: &str| ByteCount(result[key].as_u64().unwrap_or(0));
    let lines = [
        ("set-up time", ms("setup_ms") + &stopped.unwrap_or_default()),
        ("total time", format!("{} in {} rounds", ms("total_ms"), result["rounds"])),
        ("total data", bytes("sent_bytes").to_string()),
        (
            "downtime",
            format!("{}, of which {} to compare all memory", ms("downtime_ms"), ms("verify_ms")),
        ),
        (
            "seen outside",
            format!(
                "the guest stood still for {} (to {}); longest pause between heartbeats, 100 ms \
                 apart: {}",
                ms("guest_gap_ms"),
                ms("guest_gap_resolution_ms"),
                ms("longest_heartbeat_gap_ms"),
            ),
        ),
        (
            "guest's speed",
            format!(
                "{} during the migration, {} after it, of what it was before; tracked for {}",
                share("guest_speed_during"),
                share("guest_speed_after"),
                ms("slow_ms"),
            ),
        ),
        (
            "resources",
            format!(
                "{:.0} ms CPU and at most {} memory in godwit's processes",
                number(result, "cpu_ms"),
                bytes("peak_rss_bytes")
            ),
        ),
        ("memory", format!("{verified}; BUG lines of the guest: {}", result["bug"])),
    ];
    println!();
    for (label, text) in lines {
        print!("{}", output::labelled(label, 15, &text, layout::width(&std::io::stdout())));
    }
}
