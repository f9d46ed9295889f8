//! One move, by one of the two, and its figures.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_bench::figures::Figures;
use godwit_bench::fixture::{Fixture, Moved};
use godwit_bench::godwit::Attempt;
use godwit_bench::report::median;
use godwit_bench::table::{Column, Table, figure};
use godwit_bench::waits::{Wait, Waits};
use godwit_testbed::{Godwit, TestVm, VmConfig};
use serde::Serialize;
use serde_json::{Value, json};

use crate::qemu;

/// The guest's own speed is that over this time before the move.
const BEFORE: Duration = Duration::from_secs(2);
/// It is looked at for so long after the move: memory that came in small pages is slower.
const AFTER: Duration = Duration::from_secs(2);
const LIMIT: Duration = Duration::from_secs(300);
/// The source QEMU must live on to be asked what it used.
const OPTIONS: [&str; 5] = ["--postcopy", "now", "--reconnect", "60s", "--keep-source"];
const PINGS: usize = 1000;
/// So many of the longest waits are written down one by one.
const LONGEST: usize = 20;

/// Who moves the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Contestant {
    Godwit,
    Qemu,
}

impl Contestant {
    pub(crate) const ALL: [Self; 2] = [Self::Qemu, Self::Godwit];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Godwit => "godwit",
            Self::Qemu => "QEMU post-copy",
        }
    }
}

/// What many values come to.
pub(crate) type Pick = fn(&[f64]) -> f64;

/// One move.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) contestant: &'static str,
    pub(crate) under: &'static str,
    pub(crate) round: usize,
    #[serde(flatten)]
    pub(crate) measured: Measured,
    pub(crate) bugs: usize,
    /// The longest waits.
    longest: Vec<LongWait>,
    /// What the contestant says of itself.
    pub(crate) own_words: Value,
}

/// One of the longest waits.
#[derive(Clone, Copy, Debug, Serialize)]
struct LongWait {
    /// When it began, from the beginning of the first wait on.
    at_ms: f64,
    length_ms: f64,
}

/// The figures of one move, all of them seen by bystanders but for `device_ms`.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Measured {
    /// From the command to the last page.
    pub(crate) total_ms: f64,
    /// Of it, until the guest was stopped.
    pub(crate) before_ms: f64,
    /// And from its start at the destination on.
    pub(crate) after_ms: f64,
    /// From the stop of the guest at the source to its start at the destination, by QEMU's events.
    pub(crate) switchover_ms: f64,
    /// From the guest's last count there to its first one here: with the pages that it needs to
    /// count.
    pub(crate) gap_ms: f64,
    /// Waits of its processors for a page.
    pub(crate) waits: f64,
    /// The median of them.
    pub(crate) median_us: f64,
    /// 99 of a hundred are shorter.
    pub(crate) p99_us: f64,
    /// The longest.
    pub(crate) longest_ms: f64,
    /// Those of more than a millisecond.
    pub(crate) over_1_ms: f64,
    /// All together.
    pub(crate) waited_ms: f64,
    /// What the guest did not do from the beginning of the move to [`AFTER`] its end, in seconds of
    /// its work before; at least the time that its one processor certainly stood still. Less than
    /// that says that it was disturbed before the move, in the time that it is compared with.
    pub(crate) lost_s: f64,
    pub(crate) sent_mib: f64,
    /// Of all but the guest's processors.
    pub(crate) cpu_s: f64,
    /// A round trip over the same network, just before the move.
    pub(crate) round_trip_ms: f64,
    /// Saving, sending and loading the state of the devices, as godwit tells; QEMU does not.
    pub(crate) device_ms: Option<f64>,
}

pub(crate) const TABLE: Table<(String, Measured)> = Table(&[
    Column { head: "", width: 16, cell: |row| row.0.clone() },
    Column { head: "total ms", width: 8, cell: |row| figure(row.1.total_ms, 0) },
    Column { head: "= before", width: 8, cell: |row| figure(row.1.before_ms, 0) },
    Column { head: "after", width: 5, cell: |row| figure(row.1.after_ms, 0) },
    Column { head: "switchover ms", width: 13, cell: |row| figure(row.1.switchover_ms, 2) },
    Column { head: "device ms", width: 9, cell: |row| device(&row.1) },
    Column { head: "gap ms", width: 7, cell: |row| figure(row.1.gap_ms, 1) },
    Column { head: "waits", width: 6, cell: |row| figure(row.1.waits, 0) },
    Column { head: "median µs", width: 9, cell: |row| figure(row.1.median_us, 0) },
    Column { head: "p99 µs", width: 7, cell: |row| figure(row.1.p99_us, 0) },
    Column { head: "longest ms", width: 10, cell: |row| figure(row.1.longest_ms, 1) },
    Column { head: "over 1 ms", width: 9, cell: |row| figure(row.1.over_1_ms, 0) },
    Column { head: "waited ms", width: 9, cell: |row| figure(row.1.waited_ms, 0) },
    Column { head: "lost s", width: 6, cell: |row| figure(row.1.lost_s, 2) },
    Column { head: "sent MiB", width: 8, cell: |row| figure(row.1.sent_mib, 0) },
    Column { head: "CPU s", width: 6, cell: |row| figure(row.1.cpu_s, 2) },
]);

fn device(measured: &Measured) -> String {
    figure(measured.device_ms.unwrap_or(f64::NAN), 2)
}

/// A move, and what bystanders saw of it. Times are by the clock of QEMU's events.
struct Came {
    moved: Moved,
    began: Duration,
    stopped: Duration,
    resumed: Duration,
    device_ms: Option<f64>,
}

/// Starts a guest like `config`, and has `contestant` move it.
pub(crate) fn one_move(
    contestant: Contestant,
    (under, config): (&'static str, &VmConfig),
    round: usize,
    (godwit, with): (&Godwit, &[String]),
) -> anyhow::Result<Row> {
    let mut fixture = Fixture { lead: BEFORE, tail: AFTER, ..Fixture::new(config.clone(), LIMIT) };
    let mut found = None;
    let outcome = fixture.one_move(|source, destination| {
        let round_trip = round_trip()?;
        let waits = Waits::of(destination.vcpu_threads())?;
        let came = match contestant {
            Contestant::Godwit => by_godwit((godwit, with), source, destination)?,
            Contestant::Qemu => by_qemu(source, destination)?,
        };
        let moved = came.moved.clone();
        found = Some((came, waits.end()?, round_trip));
        Ok(moved)
    })?;
    let (came, waits, round_trip) = found.context("nothing was seen")?;
    let (before, switchover) = came.parts()?;
    let part = |percent: usize| waits.get(waits.len().saturating_sub(1) * percent / 100);
    let (Some(median), Some(p99), Some(longest)) = (part(50), part(99), waits.last()) else {
        anyhow::bail!("the guest did not wait for a single page");
    };

    let figures = Figures::of(contestant.name(), &outcome);
    let speed = outcome.rate_before(BEFORE);
    let trace = outcome.trace.context("nobody has looked on")?;
    let (from, to) = (outcome.began, outcome.began + outcome.moved.wall + AFTER);
    let loss = trace.loss(from, to, speed);
    let waited: Duration = waits.iter().map(|wait| wait.length).sum();
    let measured = Measured {
        total_ms: figures.total_ms,
        before_ms: ms(before),
        after_ms: figures.total_ms - ms(before + switchover),
        switchover_ms: ms(switchover),
        gap_ms: figures.downtime_ms,
        waits: waits.len() as f64,
        median_us: ms(median.length) * 1e3,
        p99_us: ms(p99.length) * 1e3,
        longest_ms: ms(longest.length),
        over_1_ms: waits.iter().filter(|wait| ms(wait.length) > 1.0).count() as f64,
        waited_ms: ms(waited),
        lost_s: loss.work.max(switchover + waited).as_secs_f64(),
        sent_mib: figures.sent_mib,
        cpu_s: figures.cpu_s,
        round_trip_ms: ms(round_trip),
        device_ms: came.device_ms,
    };
    measured.check()?;
    let first = waits.iter().map(|wait| wait.since).min().unwrap_or_default();
    let long = |wait: &Wait| LongWait { at_ms: ms(wait.since - first), length_ms: ms(wait.length) };
    let longest = waits.iter().rev().take(LONGEST).map(long).collect();
    let Figures { contestant, own_words, bugs, .. } = figures;
    Ok(Row { contestant, under, round, measured, bugs, longest, own_words })
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

impl Came {
    /// Until the guest was stopped, and until it ran again.
    fn parts(&self) -> anyhow::Result<(Duration, Duration)> {
        let Self { began, stopped, resumed, .. } = self;
        let parts = stopped.checked_sub(*began).zip(resumed.checked_sub(*stopped));
        parts.with_context(|| {
            format!("began at {began:?}, stopped at {stopped:?}, resumed at {resumed:?}")
        })
    }
}

fn by_qemu(source: &mut TestVm, destination: &mut TestVm) -> anyhow::Result<Came> {
    let own = qemu::post_copy(source, destination, LIMIT)?;
    let stopped = source.qmp().wait_event("STOP", LIMIT)?.emitted;
    let moved = Moved {
        finished: true,
        wall: own.ended.saturating_sub(own.began),
        sent: own.sent,
        rounds: own.passes,
        godwit_cpu: Duration::ZERO,
        own_words: own.words,
    };
    Ok(Came { moved, began: own.began, stopped, resumed: own.resumed, device_ms: None })
}

fn by_godwit(
    (godwit, with): (&Godwit, &[String]),
    source: &mut TestVm,
    destination: &mut TestVm,
) -> anyhow::Result<Came> {
    source.qmp().forget_events();
    let options: Vec<&str> = OPTIONS.into_iter().chain(with.iter().map(String::as_str)).collect();
    let attempt = Attempt::within(LIMIT, godwit, source, destination, &options)?;
    let (migrate, receive) = attempt.moved()?;
    let (last, received) = (migrate.last(), receive.last());
    let missing = last["post_copy"]["missing_bytes"].as_u64();
    ensure!(missing.is_some_and(|bytes| bytes > 0), "no post-copy: {last}");
    // The source's word for loading has the time in it in which the destination gets ready to wait
    // for pages; the destination's own has not.
    let save = last["save_ms"].as_f64().with_context(|| format!("no save_ms: {last}"))?;
    let load = received["load_ms"].as_f64().with_context(|| format!("no load_ms: {received}"))?;
    let stopped = source.qmp().wait_event("STOP", LIMIT)?.emitted;
    let own_words = json!({ "migrate": last, "receive": received });
    let moved = Moved { wall: attempt.whole, ..Moved::by_godwit(&attempt, own_words) };
    let (began, resumed) = (attempt.began, attempt.began + attempt.wall);
    Ok(Came { moved, began, stopped, resumed, device_ms: Some(save + load) })
}

/// The time that a byte takes to and fro over loopback, the median.
fn round_trip() -> anyhow::Result<Duration> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut here = TcpStream::connect(listener.local_addr()?)?;
    let (mut there, _) = listener.accept()?;
    for end in [&here, &there] {
        end.set_nodelay(true)?;
    }
    let echo = std::thread::spawn(move || -> std::io::Result<()> {
        let mut byte = [0];
        for _ in 0..PINGS {
            there.read_exact(&mut byte)?;
            there.write_all(&byte)?;
        }
        Ok(())
    });
    let mut times = Vec::with_capacity(PINGS);
    for _ in 0..PINGS {
        let (sent, mut byte) = (Instant::now(), [1]);
        here.write_all(&byte)?;
        here.read_exact(&mut byte)?;
        times.push(sent.elapsed().as_secs_f64());
    }
    echo.join().ok().context("the echo has panicked")??;
    Ok(Duration::from_secs_f64(median(&times)))
}

impl Measured {
    /// A figure that is missing would make a median of fewer moves than it says.
    fn check(&self) -> anyhow::Result<()> {
        let found = serde_json::to_value(self)?;
        let missing = found.as_object().into_iter().flatten().filter(|(name, value)| {
            // Not a number is null; so is what QEMU does not tell.
            value.is_null() && *name != "device_ms"
        });
        let names: Vec<_> = missing.map(|(name, _)| name.as_str()).collect();
        ensure!(names.is_empty(), "not measured: {}", names.join(", "));
        Ok(())
    }

    /// `pick` of each figure of `rows`: their medians, say.
    pub(crate) fn of(rows: &[&Self], pick: Pick) -> Self {
        let all = |figure: fn(&Self) -> f64| {
            pick(&rows.iter().map(|row| figure(row)).collect::<Vec<_>>())
        };
        let devices: Vec<f64> = rows.iter().filter_map(|row| row.device_ms).collect();
        Self {
            total_ms: all(|row| row.total_ms),
            before_ms: all(|row| row.before_ms),
            after_ms: all(|row| row.after_ms),
            switchover_ms: all(|row| row.switchover_ms),
            gap_ms: all(|row| row.gap_ms),
            waits: all(|row| row.waits),
            median_us: all(|row| row.median_us),
            p99_us: all(|row| row.p99_us),
            longest_ms: all(|row| row.longest_ms),
            over_1_ms: all(|row| row.over_1_ms),
            waited_ms: all(|row| row.waited_ms),
            lost_s: all(|row| row.lost_s),
            sent_mib: all(|row| row.sent_mib),
            cpu_s: all(|row| row.cpu_s),
            round_trip_ms: all(|row| row.round_trip_ms),
            device_ms: (!devices.is_empty()).then(|| pick(&devices)),
        }
    }
}
