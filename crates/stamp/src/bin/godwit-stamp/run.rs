//! `godwit-stamp run`: everything is stamped once, then written and checked until it ends.
//!
//! Keeps three promises: a unit has one writer, so a difference is never a race; what was found is
//! told once and ends nothing; whatever ends the run, workers finish what they have begun and what
//! was written is synced. A device that fails is no bug: it ends the run with the reason.

mod places;
mod worker;

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use godwit_stamp::finding::{Expected, Finding, Wanted};
use godwit_stamp::journal::Header;
use godwit_stamp::pattern::{EXTENT, owner};
use godwit_stamp::sector::Unit;
use godwit_stamp::table::State;
use godwit_units::{ByteCount, PAGE_SIZE};
use serde_json::json;

use crate::arguments::RunArguments;
use crate::device::{DeviceError, Purpose, open_all};
use crate::journal::{JournalError, JournalFile};
use crate::report::{Outcome, Progress, Report, Signals, now};
use places::Place;
use worker::Worker;

/// How often the main thread looks whether it is time for something.
const TICK: Duration = Duration::from_millis(20);

/// Why there is no run, or why it ended before its time.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RunError {
    #[error("{0}")]
    Device(#[from] DeviceError),
    #[error("{0}")]
    Journal(#[from] JournalError),
    #[error("--workers {workers}: there are {extents} parts of 1MiB, and each worker needs one")]
    Workers { workers: u16, extents: u64 },
    #[error("--discard {0} and --write-zeroes {1}: together no more than 100")]
    Percent(u8, u8),
    #[error("--memory {0}: at least 1MiB is needed")]
    Memory(ByteCount),
    #[error("--memory {0}: no more than {1} is available here: ask for less")]
    TooMuch(ByteCount, ByteCount),
    #[error("--span {0}: at least 1MiB is needed")]
    Span(ByteCount),
    #[error("cannot {what}: {source}")]
    Os { what: &'static str, source: io::Error },
}

/// What all workers share.
struct Run<'a> {
    arguments: &'a RunArguments,
    id: u64,
    places: Vec<Place>,
    started: Instant,
    /// The run's start in nanoseconds since 1970.
    epoch: u64,
    journal: Option<Mutex<JournalFile>>,
    report: Report,
    written: AtomicU64,
    checked: AtomicU64,
    /// Units that changed while they were looked at.
    raced: AtomicU64,
    /// Bytes that may still be written.
    left: AtomicU64,
    /// Workers that found that nothing may be written any more.
    through: AtomicU64,
    /// The extent that is checked next, counted through all places.
    sweep: AtomicU64,
    ending: AtomicBool,
    failure: Mutex<Option<RunError>>,
}

/// Does all of it.
pub(crate) fn run(arguments: &RunArguments) -> Result<Outcome, RunError> {
    let signals =
        Signals::catch().map_err(|source| RunError::Os { what: "catch signals", source })?;
    let run = Run::prepare(arguments)?;
    let extents = run.extents();
    run.phase(&signals, Phase::Fill)?;
    if !signals.any() {
        let seconds = run.started.elapsed().as_secs_f64();
        run.report.line(&format!(
            "stamped {} in {} places in {seconds:.1} s, run {:016x}; writing and checking",
            bytes(extents * EXTENT),
            run.places.len(),
            run.id
        ));
        run.phase(&signals, Phase::Work)?;
    }
    if arguments.time.is_some() && !signals.any() {
        run.phase(&signals, Phase::LastLook)?;
    }
    // An orderly end: each worker has synced what it wrote.
    if let Some(journal) = &run.journal {
        journal.lock().unwrap_or_else(PoisonError::into_inner).end()?;
    }
    Ok(run.result(&signals))
}

fn bytes(units: u64) -> ByteCount {
    ByteCount(units * PAGE_SIZE)
}

/// What is done one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The first stamps everywhere.
    Fill,
    /// Writing and checking.
    Work,
    /// Everything once more.
    LastLook,
}

impl<'a> Run<'a> {
    /// Everything that can be refused is refused here, before anything is written.
    fn prepare(arguments: &'a RunArguments) -> Result<Self, RunError> {
        if arguments.discard + arguments.write_zeroes > 100 {
            return Err(RunError::Percent(arguments.discard, arguments.write_zeroes));
        }
        let extent_bytes = EXTENT * PAGE_SIZE;
        if let Some(size) = arguments.memory.filter(|size| size.0 < extent_bytes) {
            return Err(RunError::Memory(size));
        }
        if let (Some(size), Some(available)) = (arguments.memory, places::available())
            && size > available
        {
            return Err(RunError::TooMuch(size, available));
        }
        if let Some(size) = arguments.span.filter(|size| size.0 < extent_bytes) {
            return Err(RunError::Span(size));
        }
        let devices = open_all(&arguments.devices, Purpose::Run, arguments.direct)?;
        for device in &devices {
            device.must_hold(arguments.span.map_or(0, |span| span.0.div_ceil(PAGE_SIZE)))?;
        }
        let span = arguments.span.map_or(u64::MAX, |span| span.0 / extent_bytes);
        let mut places: Vec<Place> = (0..)
            .zip(devices)
            .map(|(number, device)| {
                let extents = device.extents().min(span);
                Place::device(number, device, extents)
            })
            .collect();
        if let Some(size) = arguments.memory {
            places.push(Place::memory(size.0 / extent_bytes));
        }
        let mut owned = vec![false; usize::from(arguments.workers)];
        let workers = u64::from(arguments.workers);
        for (number, place) in places.iter().enumerate() {
            for extent in 0..place.extents().min(workers) {
                owned[owner(number, extent, workers) as usize] = true;
            }
        }
        if owned.contains(&false) {
            let extents = places.iter().map(Place::extents).sum();
            return Err(RunError::Workers { workers: arguments.workers, extents });
        }
        let id = arguments.seed.map_or_else(|| fastrand::u64(1..), |seed| seed ^ now());
        let spans = places.iter().filter(|place| place.is_device()).map(Place::units).collect();
        let header = Header { run: id, zeroes: zeroes(arguments), spans };
        let journal = arguments.journal.as_deref().map(|path| JournalFile::create(path, &header));
        Ok(Self {
            arguments,
            id,
            places,
            started: Instant::now(),
            epoch: now(),
            journal: journal.transpose()?.map(Mutex::new),
            report: Report::new(arguments.json),
            written: AtomicU64::new(0),
            checked: AtomicU64::new(0),
            raced: AtomicU64::new(0),
            left: AtomicU64::new(arguments.writes.map_or(u64::MAX, |most| most.0)),
            through: AtomicU64::new(0),
            sweep: AtomicU64::new(0),
            ending: AtomicBool::new(false),
            failure: Mutex::default(),
        })
    }

    fn extents(&self) -> u64 {
        self.places.iter().map(Place::extents).sum()
    }

    /// Has all workers do it, and tells of it until they have.
    fn phase(&self, signals: &Signals, phase: Phase) -> Result<(), RunError> {
        let total = self.extents() * EXTENT * PAGE_SIZE;
        let (what, counter) = match phase {
            Phase::LastLook => ("last look", &self.checked),
            _ => ("stamping", &self.written),
        };
        let mut progress = Progress::new(what, total);
        let before = counter.load(Ordering::Relaxed);
        self.sweep.store(0, Ordering::SeqCst);
        self.ending.store(false, Ordering::SeqCst);
        let began = Instant::now();
        thread::scope(|scope| {
            let mut workers = Vec::new();
            for number in 0..self.arguments.workers {
                let builder = thread::Builder::new().name(format!("worker {number}"));
                let worker = builder.spawn_scoped(scope, move || {
                    let done = Worker::new(self, number).and_then(|mut worker| match phase {
                        Phase::Fill => worker.fill(),
                        Phase::Work => worker.work(),
                        Phase::LastLook => worker.last_look(),
                    });
                    done.unwrap_or_else(|problem| self.fail(problem));
                });
                match worker {
                    Ok(worker) => workers.push(worker),
                    Err(source) => self.fail(RunError::Os { what: "start a thread", source }),
                }
            }
            let mut next_report = self.arguments.report;
            while workers.iter().any(|worker| !worker.is_finished()) {
                let elapsed = began.elapsed();
                let time_is_up =
                    phase == Phase::Work && self.arguments.time.is_some_and(|time| elapsed >= time);
                if signals.any() || time_is_up {
                    self.ending.store(true, Ordering::SeqCst);
                }
                if phase == Phase::Work && elapsed >= next_report {
                    next_report = elapsed + self.arguments.report;
                    self.report.line(&self.so_far());
                } else if phase != Phase::Work {
                    progress.tell(counter.load(Ordering::Relaxed) - before);
                }
                thread::sleep(TICK);
            }
        });
        progress.done();
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner).take();
        failure.map_or(Ok(()), Err)
    }

    /// The first failure is told, and ends everything.
    fn fail(&self, problem: RunError) {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(problem);
        self.ending.store(true, Ordering::SeqCst);
    }

    fn so_far(&self) -> String {
        format!(
            "written {}, checked {}, bugs {}, {:.1} s",
            ByteCount(self.written.load(Ordering::Relaxed)),
            ByteCount(self.checked.load(Ordering::Relaxed)),
            self.report.bugs(),
            self.started.elapsed().as_secs_f64()
        )
    }

    fn result(&self, signals: &Signals) -> Outcome {
        let outcome = Outcome::of(self.report.bugs(), signals);
        let devices = self.places.iter().filter(|place| place.is_device());
        let devices: Vec<_> = devices
            .map(|place| {
                let (number, size) = (place.number(), bytes(place.units()).0);
                json!({"number": number, "path": place.name(), "bytes": size})
            })
            .collect();
        let facts = json!({
            "run": format!("{:016x}", self.id),
            "devices": devices,
            "memory_bytes": self.arguments.memory.map_or(0, |size| size.0),
            "written_bytes": self.written.load(Ordering::Relaxed),
            "checked_bytes": self.checked.load(Ordering::Relaxed),
            "changed_meanwhile_bytes": bytes(self.raced.load(Ordering::Relaxed)).0,
            "seconds": self.started.elapsed().as_secs_f64(),
        });
        self.report.result(outcome, &self.so_far(), facts);
        outcome
    }

    fn millis(&self) -> u32 {
        u32::try_from(self.started.elapsed().as_millis()).unwrap_or(u32::MAX)
    }

    /// Looks at one unit that was read when its state was `state` before and after.
    #[inline]
    fn look(&self, number: usize, unit: u64, state: State, content: &Unit) {
        let place = &self.places[number];
        let generation = state.generation();
        if !state.zero() && content.matches(self.id, place.number(), unit, generation) {
            return place.table().saw(unit, state);
        }
        let wanted = Wanted::Exactly { generation, zero: state.zero(), seen: state.seen() };
        let millis = u64::from(place.table().written_millis(unit));
        let expected = Expected {
            run: self.id,
            device: place.number(),
            unit,
            zeroes: zeroes(self.arguments),
            wanted,
            zeroes_before: state.zeroes_before(),
            nanos: Some(self.epoch + millis * 1_000_000),
        };
        match godwit_stamp::finding::diagnose(content, &expected) {
            Ok(_) => place.table().saw(unit, state),
            Err(finding) => self.found(place, state, &finding),
        }
    }

    fn found(&self, place: &Place, state: State, finding: &Finding) {
        if place.table().tell(finding.expected.unit, state) {
            self.report.bug(finding, &place.name());
        }
    }
}

fn zeroes(arguments: &RunArguments) -> bool {
    arguments.discard + arguments.write_zeroes > 0
}
