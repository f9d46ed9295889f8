//! What a client hears of an idle guest with ordinary devices while it moves: by godwit, and by
//! QEMU itself.
//!
//! The client pings every 5 ms over a switch. Its silence is divided: the downtime, with its parts
//! as godwit tells them, and the time from the guest's first instruction to its first answer, in
//! which the guest's processor either ran or waited for one of the host's. In moves of their own,
//! a client talks over one TCP connection instead, and counts how long it waits for an answer
//! beyond the downtime; also of a guest on KVM. Keeps one promise: what is said of the client was
//! seen by the client.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Parser;
use godwit_bench::report::{Better, Report, median};
use godwit_bench::table::{Column, Table, figure};
use godwit_stamp::settings::Mode;
use godwit_testbed::{
    Backend, DiskImage, Godwit, GuestConfig, Lan, QemuBuild, Style, TestVm, VmConfig, builds_for,
    kvm_builds_for, own_migration,
};
use godwit_units::ByteCount;
use serde_json::{Map, Value, json};

const LIMIT: Duration = Duration::from_secs(60);
const ANSWERS: usize = 100;
const PARTS: [&str; 6] =
    ["downtime_ms", "drain_ms", "copy_ms", "save_ms", "load_ms", "handover_ms"];
/// What is measured here of the time behind the downtime.
const BEHIND: [&str; 4] = ["silence_ms", "to_answer_ms", "vcpu_ran_ms", "vcpu_waited_ms"];

/// What a client that pings hears of a guest that moves.
#[derive(Parser)]
struct Options {
    /// Moves by each, in turns
    #[arg(long, value_name = "N", default_value_t = 5)]
    moves: usize,
}

fn main() -> anyhow::Result<()> {
    let Options { moves } = Options::parse();
    let mut report = Report::new("ping");
    report.figure("moves", moves);
    let lan = Lan::create()?;
    let image = DiskImage::create("raw", ByteCount(64 << 20))?;
    for build in &builds_for("bench ping") {
        measure(&mut report, &lan, build, &image, moves)?;
    }
    for build in &kvm_builds_for("bench ping on KVM") {
        let config = VmConfig::new(build, GuestConfig::small(Mode::Rate)).on_kvm();
        let config = config.with_backend(Backend::Anonymous);
        let mut source = TestVm::source(&lan.attach(&config)?)?;
        source.wait_ready(LIMIT)?;
        let name = format!("{build} on KVM");
        let figures = over_tcp(&mut report, &name, (&lan, &config), &mut source, moves)?;
        report.figure(&name, figures);
    }
    report.finish()?;
    Ok(())
}

/// One move by each, in milliseconds.
struct Row {
    qemu: f64,
    parts: [f64; PARTS.len()],
    behind: [f64; BEHIND.len()],
}

const TABLE: Table<Row> = Table(&[
    Column { head: "QEMU", width: 6, cell: |row| figure(row.qemu, 1) },
    Column { head: "godwit", width: 7, cell: |row| figure(row.behind[0], 1) },
    Column { head: "| downtime", width: 10, cell: |row| figure(row.parts[0], 1) },
    Column { head: "= drain", width: 7, cell: |row| figure(row.parts[1], 1) },
    Column { head: "copy", width: 6, cell: |row| figure(row.parts[2], 1) },
    Column { head: "save", width: 6, cell: |row| figure(row.parts[3], 1) },
    Column { head: "load", width: 6, cell: |row| figure(row.parts[4], 1) },
    Column { head: "handover", width: 8, cell: |row| figure(row.parts[5], 1) },
    Column { head: "| to answer", width: 11, cell: |row| figure(row.behind[1], 1) },
    Column { head: "= vCPU ran", width: 10, cell: |row| figure(row.behind[2], 1) },
    Column { head: "waited", width: 7, cell: |row| figure(row.behind[3], 1) },
]);

fn measure(
    report: &mut Report,
    lan: &Lan,
    build: &QemuBuild,
    image: &DiskImage,
    moves: usize,
) -> anyhow::Result<()> {
    let file =
        format!("file.driver=file,file.filename={},file.cache.direct=on", image.path().display());
    let node = format!("driver=raw,node-name=disk,cache.direct=on,{file}");
    let config = VmConfig::new(build, GuestConfig::small(Mode::Idle).without_rest())
        .with_extra(&["-blockdev", &node, "-device", "virtio-blk-pci,drive=disk", "-cpu", "max"])
        .with_extra(&["-device", "virtio-balloon-pci,free-page-reporting=on"]);
    let mut source = TestVm::source(&lan.attach(&config)?)?;
    source.wait_ready(LIMIT)?;
    println!(
        "\n{build}, ms: the client's silence, by QEMU itself and by godwit, and what godwit's \
         consists of"
    );
    TABLE.print_head();
    let (mut own, mut list) = (Vec::new(), Vec::new());
    for _ in 0..moves {
        let silence = by_qemu(lan, &config, &mut source)?;
        let row = by_godwit(lan, &config, &mut source)?;
        let of = |key: &str| row[key].as_f64().unwrap_or(f64::NAN);
        TABLE.print(&Row { qemu: silence, parts: PARTS.map(of), behind: BEHIND.map(of) });
        own.push(silence);
        list.push(row);
    }
    let middle =
        |key: &str| median(&list.iter().filter_map(|row| row[key].as_f64()).collect::<Vec<_>>());
    let names = PARTS.iter().chain(&BEHIND);
    let medians: Map<String, Value> =
        names.map(|name| ((*name).to_owned(), json!(middle(name)))).collect();
    let (godwit, qemu) = (middle("silence_ms"), median(&own));
    report.target(
        format!("{build}: a client's silence, times that of QEMU's own migration"),
        godwit / qemu,
        1.5,
        Better::Lower,
    );
    let name = build.to_string();
    let over_tcp = over_tcp(report, &name, (lan, &config), &mut source, moves)?;
    let figures = json!({
        "qemu_silence_ms": qemu,
        "godwit": medians,
        "moves": list,
        "over_tcp": over_tcp,
    });
    report.figure(&name, figures);
    Ok(())
}

/// A move while a client talked over TCP, in milliseconds.
struct Talked {
    /// The longest time without an answer, and the downtime as the events of both QEMUs tell it.
    silence: f64,
    downtime: f64,
}

const TCP_TABLE: Table<[Talked; 2]> = Table(&[
    Column { head: "QEMU", width: 8, cell: |row| figure(row[0].silence, 1) },
    Column { head: "downtime", width: 8, cell: |row| figure(row[0].downtime, 1) },
    Column { head: "| godwit", width: 9, cell: |row| figure(row[1].silence, 1) },
    Column { head: "downtime", width: 8, cell: |row| figure(row[1].downtime, 1) },
]);

/// Moves by each, in turns, of the guest of `source`, with which a client talks. A connection that
/// breaks is an error, whoever moved.
fn over_tcp(
    report: &mut Report,
    name: &str,
    (lan, config): (&Lan, &VmConfig),
    source: &mut TestVm,
    moves: usize,
) -> anyhow::Result<Value> {
    println!("\n{name}, ms: the silence of a client that talks over TCP, beside the downtime");
    TCP_TABLE.print_head();
    let mut rows = Vec::new();
    for _ in 0..moves {
        let by_qemu = talked(lan, config, source, |source, destination| {
            own_migration(source, destination, Style::Plain, LIMIT)?
                .switchover
                .context("the guest was not stopped")
        })?;
        let godwit = lan.place(&Godwit::built()?);
        let by_godwit = talked(lan, config, source, |source, destination| {
            let (receive, address) = godwit.receive(destination, &[])?;
            // The source is asked for its events.
            let ended = godwit.migrate(source, &address, &["--keep-source"])?.wait(LIMIT)?;
            ensure!(ended.last()["outcome"] == "migrated", "{} {}", ended.last(), ended.errors);
            receive.wait(LIMIT)?;
            let resumed = destination.qmp().wait_event("RESUME", LIMIT)?.emitted;
            let stopped = source.qmp().wait_event("STOP", LIMIT)?.emitted;
            resumed.checked_sub(stopped).context("the guest ran before it was stopped")
        })?;
        let row = [by_qemu, by_godwit];
        TCP_TABLE.print(&row);
        rows.push(row);
    }
    let middle = |who: usize, of: fn(&Talked) -> f64| {
        median(&rows.iter().map(|row| of(&row[who])).collect::<Vec<_>>())
    };
    let beyond = |it: &Talked| it.silence - it.downtime;
    report.target(
        format!("{name}: a TCP client's silence beyond the downtime, ms"),
        middle(1, beyond),
        20.0,
        Better::Lower,
    );
    let silence = |it: &Talked| it.silence;
    report.target(
        format!("{name}: a TCP client's silence, times that of QEMU's own migration"),
        middle(1, silence) / middle(0, silence),
        1.0,
        Better::Lower,
    );
    let [qemu, godwit] = [0, 1].map(|who| {
        json!({ "silence_ms": middle(who, silence), "beyond_downtime_ms": middle(who, beyond) })
    });
    let moves = rows.iter().map(|row| {
        row.each_ref().map(|it| json!({ "silence_ms": it.silence, "downtime_ms": it.downtime }))
    });
    let moves: Vec<_> = moves.collect();
    Ok(json!({ "qemu": qemu, "godwit": godwit, "moves": moves }))
}

/// What a client that talks with the guest of `source` has of it while `moves` moves it, which
/// tells the downtime; `source` then is what it was moved to.
fn talked(
    lan: &Lan,
    config: &VmConfig,
    source: &mut TestVm,
    moves: impl FnOnce(&mut TestVm, &mut TestVm) -> anyhow::Result<Duration>,
) -> anyhow::Result<Talked> {
    let mut destination = TestVm::destination(&lan.attach(config)?)?;
    let talk = lan.talk()?;
    talk.await_answers(ANSWERS)?;
    source.qmp().forget_events();
    destination.qmp().forget_events();
    let began = Instant::now();
    let downtime = ms(moves(source, &mut destination)?);
    source.kill();
    talk.await_answers(ANSWERS)?;
    let silence = talk.finish()?.longest_silence(began, Instant::now());
    *source = destination;
    Ok(Talked { silence: ms(silence.context("nothing was heard")?.length()), downtime })
}

/// The client's silence, in ms, while QEMU moves the guest of `source`, which then is what it has
/// moved to.
fn by_qemu(lan: &Lan, config: &VmConfig, source: &mut TestVm) -> anyhow::Result<f64> {
    let mut destination = TestVm::destination(&lan.attach(config)?)?;
    let pings = lan.ping()?;
    pings.await_answers(ANSWERS, LIMIT)?;
    let began = Instant::now();
    own_migration(source, &mut destination, Style::Plain, LIMIT)?;
    source.kill();
    pings.await_answers(ANSWERS, LIMIT)?;
    let silence =
        pings.finish()?.longest_silence(began, Instant::now()).context("nothing was heard")?;
    *source = destination;
    Ok(ms(silence.length()))
}

/// The same by godwit, with all that is to be known of it.
fn by_godwit(
    lan: &Lan,
    config: &VmConfig,
    source: &mut TestVm,
) -> anyhow::Result<Map<String, Value>> {
    let godwit = lan.place(&Godwit::built()?);
    let mut destination = TestVm::destination(&lan.attach(config)?)?;
    let pings = lan.ping()?;
    pings.await_answers(ANSWERS, LIMIT)?;
    destination.qmp().forget_events();
    let clock = VcpuClock::start(&destination)?;
    let began = Instant::now();
    let (receive, address) = godwit.receive(&destination, &[])?;
    let ended = godwit.migrate(source, &address, &[])?.wait(LIMIT)?;
    ensure!(ended.last()["outcome"] == "migrated", "{} {}", ended.last(), ended.errors);
    pings.await_answers(ANSWERS, LIMIT)?;
    receive.wait(LIMIT)?;
    let resumed = destination.qmp().wait_event("RESUME", LIMIT)?.at;
    let heard = pings.finish()?;
    let samples = clock.finish()?;
    let silence = heard.longest_silence(began, Instant::now()).context("nothing was heard")?;
    let answer = heard.answered.iter().find(|at| **at > resumed).context("no answer")?;
    // The last sample of before; what the processor did in the millisecond between is not known.
    let before =
        |at: Instant| samples.iter().rfind(|sample| sample.0 <= at).map_or((0.0, 0.0), |it| it.1);
    let ((ran, waited), (ran_before, waited_before)) = (before(*answer), before(resumed));
    let values =
        [ms(silence.length()), ms(*answer - resumed), ran - ran_before, waited - waited_before];
    let mut row: Map<String, Value> =
        BEHIND.iter().zip(values).map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
    row.extend(PARTS.iter().map(|name| ((*name).to_owned(), ended.last()[*name].clone())));
    *source = destination;
    Ok(row)
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// When it was looked at, and how long a thread had run and waited by then, in ms.
type Sample = (Instant, (f64, f64));

/// Looks every millisecond how long a vCPU has run, and has waited for a processor (`schedstat`,
/// kernel's Documentation/scheduler/sched-stats.rst).
struct VcpuClock {
    ends: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Sample>>,
}

impl VcpuClock {
    fn start(vm: &TestVm) -> anyhow::Result<Self> {
        let vcpu = vm.vcpu_threads().first().context("no vCPU")?;
        let path = PathBuf::from(format!("/proc/{}/task/{vcpu}/schedstat", vm.pid()));
        let ends = Arc::<AtomicBool>::default();
        let ending = Arc::clone(&ends);
        let thread = std::thread::spawn(move || {
            let mut samples = Vec::new();
            while !ending.load(Ordering::Relaxed) {
                let text = std::fs::read_to_string(&path).unwrap_or_default();
                let mut numbers =
                    text.split(' ').map(|number| number.parse::<f64>().unwrap_or(0.0) / 1e6);
                let mut next = || numbers.next().unwrap_or(0.0);
                samples.push((Instant::now(), (next(), next())));
                std::thread::sleep(Duration::from_millis(1));
            }
            samples
        });
        Ok(Self { ends, thread })
    }

    fn finish(self) -> anyhow::Result<Vec<Sample>> {
        self.ends.store(true, Ordering::Relaxed);
        self.thread.join().ok().context("the clock has panicked")
    }
}
