//! A guest in a QEMU of its own, a destination for it, and one move between them: the same for all
//! benchmarks that move guests of QEMU.
//!
//! Keeps one promise: what the guest felt is measured from outside, the same way for everybody.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_testbed::{
    BeaconPlace, Observation, Observer, OwnMigration, ProgressTrace, TestVm, VmConfig,
};
use godwit_units::ByteCount;
use procfs::process::Process;
use procfs::{Current, Meminfo};
use serde_json::{Value, json};

use crate::godwit::Attempt;
use crate::sys::Mapping;

/// After so many heartbeats the guest's kernel has done what it does only once.
const SETTLED: usize = 15;

/// What whoever moves the guest reports of one move.
#[derive(Clone, Debug)]
pub struct Moved {
    /// Whether it came to an end.
    pub finished: bool,
    /// From the command until the guest runs on the other side with all of its memory there, or
    /// until it was cancelled.
    pub wall: Duration,
    /// Bytes on the wire.
    pub sent: f64,
    /// Rounds or passes.
    pub rounds: u64,
    /// Processor time of godwit, both sides.
    pub godwit_cpu: Duration,
    /// What it says of itself.
    pub own_words: Value,
}

impl Moved {
    /// By QEMU itself.
    pub fn by_qemu(own: &OwnMigration) -> Self {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        Self {
            finished: own.finished,
            wall: own.wall,
            sent: own.sent.0 as f64,
            rounds: own.passes,
            godwit_cpu: Duration::ZERO,
            own_words: json!({ "total_ms": ms(own.total), "downtime_ms": ms(own.downtime) }),
        }
    }

    /// By godwit, of which `own_words` are kept.
    pub fn by_godwit(attempt: &Attempt, own_words: Value) -> Self {
        let last = attempt.migrate.last();
        Self {
            finished: attempt.receive.is_some(),
            wall: attempt.wall,
            sent: last["sent_bytes"].as_f64().unwrap_or(f64::NAN),
            rounds: last["rounds"].as_u64().unwrap_or(0),
            godwit_cpu: attempt.cpu,
            own_words,
        }
    }
}

/// When a guest is moved that is ready.
#[derive(Clone, Copy, Debug)]
pub enum Settled {
    /// After this many heartbeats.
    Beats(usize),
    /// After this time; at once, if it is none.
    For(Duration),
}

/// Where a guest is moved from and to.
#[derive(Debug)]
pub struct Fixture {
    /// The machine that the guest is booted in.
    pub source: VmConfig,
    /// The one that it is moved to.
    pub destination: VmConfig,
    /// When it is moved.
    pub settled: Settled,
    /// Whether an observer looks on, which reads the beacon in the RAM of both.
    pub observed: bool,
    /// How long it looks on before the move.
    pub lead: Duration,
    /// Heartbeats of a guest that must still be well afterwards.
    pub beats_after: usize,
    /// How long it looks on after them.
    pub tail: Duration,
    /// Nothing that is waited for takes longer.
    pub limit: Duration,
    /// A guest that did not leave, to be used again.
    pub left: Option<TestVm>,
}

/// One move, as it is seen from outside, and both machines after it.
#[derive(Debug)]
pub struct Outcome {
    /// What was reported of it.
    pub moved: Moved,
    /// What the observer saw; nothing where there was none.
    pub seen: Observation,
    /// How the guest got on, where an observer looked on.
    pub trace: Option<ProgressTrace>,
    /// When it began, since the observer began.
    pub began: Duration,
    /// Processor time of all threads but the guest's processors, at the source and at the
    /// destination.
    pub cpu: [Duration; 2],
    /// That of the guest's processors, likewise.
    pub vcpus: [Duration; 2],
    /// Lines in which the guest tells of damaged memory.
    pub bugs: usize,
    /// Where the guest was.
    pub source: TestVm,
    /// Where it was to go.
    pub destination: TestVm,
}

impl Outcome {
    /// What the guest counted each second in the time `lead` that the observer looked on before the
    /// move. Not up to the beginning of the move: to touch memory just before it, as
    /// [`warm_up_bytes`] does, takes a processor from the guest.
    pub fn rate_before(&self, lead: Duration) -> f64 {
        self.trace.as_ref().map_or(f64::NAN, |trace| trace.rate(Duration::ZERO, lead))
    }
}

/// Touches the memory that the guest of `vm` will take, and half of that again; gives it back.
fn warm_up(vm: &TestVm) -> anyhow::Result<()> {
    let taken = Process::new(vm.pid())?.status()?.vmrss.context("QEMU has ended")? << 10;
    warm_up_bytes(taken * 3 / 2)
}

/// Touches `bytes` of memory, as far as they are there, and gives them back. A hypervisor beneath
/// this host may have taken what is free here (free page reporting): to have it back costs some
/// twenty times what it costs to clear a page, so it would be most of what is measured, and not the
/// same for everybody.
///
/// # Errors
/// When the kernel does not tell what is free, or does not give it.
pub fn warm_up_bytes(bytes: u64) -> anyhow::Result<()> {
    let free = Meminfo::current()?.mem_available.context("an old kernel")?;
    let bytes = usize::try_from(bytes.min(free / 5 * 4))?;
    let memory = Mapping::anonymous(bytes)?;
    // Huge pages where the host has them, as the destination will.
    memory.advise(0, bytes, libc::MADV_HUGEPAGE)?;
    Ok(memory.advise(0, bytes, libc::MADV_POPULATE_WRITE)?)
}

/// Refuses to measure where there is no room for `both` sides of a move, and `beside` for
/// everything else: a run that swaps, or has something killed, says nothing. `choose` is what else
/// could be done.
///
/// # Errors
/// When there is none, or the kernel does not tell.
pub fn check_room(both: u64, beside: u64, choose: &str) -> anyhow::Result<()> {
    let meminfo = Meminfo::current()?;
    let available = meminfo.mem_available.unwrap_or(meminfo.mem_free);
    let needed = both + beside;
    ensure!(
        available >= needed,
        "{} of memory are available, and both sides need {}: end what else runs here, or choose \
         {choose}",
        ByteCount(available),
        ByteCount(needed)
    );
    Ok(())
}

impl Fixture {
    /// For two machines like `config`, with an observer and a guest that has settled.
    pub fn new(config: VmConfig, limit: Duration) -> Self {
        Self {
            source: config.clone(),
            destination: config,
            settled: Settled::Beats(SETTLED),
            observed: true,
            lead: Duration::ZERO,
            beats_after: 3,
            tail: Duration::ZERO,
            limit,
            left: None,
        }
    }

    /// Boots a guest, has `by` move it, and looks how it is.
    ///
    /// # Errors
    /// When a machine does not start, the guest is not well, or `by` fails.
    pub fn one_move(
        &mut self,
        by: impl FnOnce(&mut TestVm, &mut TestVm) -> anyhow::Result<Moved>,
    ) -> anyhow::Result<Outcome> {
        let mut source = match self.left.take() {
            Some(source) => source,
            None => TestVm::source(&self.source)?,
        };
        let mut destination = TestVm::destination(&self.destination)?;
        source.wait_ready(self.limit)?;
        match self.settled {
            Settled::Beats(count) => {
                source.wait_for_heartbeats_after(Instant::now(), count, self.limit)?;
            }
            Settled::For(time) => std::thread::sleep(time),
        }
        let observer = if self.observed {
            let (here, there) = (source.ram()?, destination.ram()?);
            Some(Observer::start(BeaconPlace::find(here.clone())?, here, there)?)
        } else {
            None
        };
        std::thread::sleep(self.lead);

        warm_up(&source)?;
        let before = (source.cpu_time()?, destination.cpu_time()?);
        let began = observer.as_ref().map_or(Duration::ZERO, |it| it.started().elapsed());
        let moved = by(&mut source, &mut destination)?;
        // A destination whose guest did not come may have ended.
        let there = destination.cpu_time();
        let there = if moved.finished { there? } else { there.unwrap_or(before.1) };
        let after = (source.cpu_time()?, there);
        let here = if moved.finished { &destination } else { &source };
        here.wait_for_heartbeats_after(Instant::now(), self.beats_after, self.limit)?;
        let (seen, trace) = match observer {
            Some(observer) => {
                std::thread::sleep(self.tail);
                let (seen, trace) = observer.finish_with_course()?;
                (seen, Some(trace))
            }
            None => (Observation::default(), None),
        };
        ensure!(!seen.ran_on_both, "the guest ran on both sides");
        let bugs = [source.bugs(), destination.bugs()].concat();
        bugs.iter().for_each(|bug| println!("{bug}"));
        let used = [after.0 - before.0, after.1 - before.1];
        let (cpu, vcpus) = (used.map(|it| it.others), used.map(|it| it.vcpus));
        Ok(Outcome { moved, seen, trace, began, cpu, vcpus, bugs: bugs.len(), source, destination })
    }
}
