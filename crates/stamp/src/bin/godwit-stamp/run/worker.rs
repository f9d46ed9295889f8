//! One worker: its writes, its looks at everybody's, and its fsyncs.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fastrand::Rng;
use godwit_stamp::journal::Acknowledged;
use godwit_stamp::pace::Pace;
use godwit_stamp::pattern::{EXTENT, Step, Walk, owner};
use godwit_stamp::sector::{SECTORS, Stamp, Unit};
use godwit_stamp::table::State;
use godwit_units::PAGE_SIZE;

use super::places::Store;
use super::{Run, RunError, zeroes};
use crate::arguments::Limit;
use crate::device::Zeroing;
use crate::report::now;

/// A worker that has nothing to do waits for so long.
const IDLE: Duration = Duration::from_millis(1);

/// When the next write or look is due.
enum Turn {
    Always,
    Never,
    /// Units that are owed; below zero after one that was larger.
    Paced(Pace, i64),
}

impl Turn {
    fn new(limit: Limit, workers: u16, now_micros: u64) -> Self {
        match limit {
            Limit::Unlimited => Self::Always,
            Limit::None => Self::Never,
            Limit::Rate(rate) => {
                let units = rate.bytes_per_second() / PAGE_SIZE as f64 / f64::from(workers);
                Self::Paced(Pace::new((units as u64).max(1), now_micros), 0)
            }
        }
    }

    fn is_due(&mut self, now_micros: u64) -> bool {
        match self {
            Self::Always => true,
            Self::Never => false,
            Self::Paced(pace, owed) => {
                *owed += pace.due(now_micros).cast_signed();
                *owed > 0
            }
        }
    }

    fn done(&mut self, units: u64) {
        if let Self::Paced(_, owed) = self {
            *owed -= units.cast_signed();
        }
    }
}

pub(super) struct Worker<'a> {
    run: &'a Run<'a>,
    number: u16,
    walk: Walk,
    random: Rng,
    buffer: Vec<Unit>,
    states: Vec<State>,
    /// What was written since the last fsync.
    pending: Vec<(usize, Acknowledged)>,
    /// Devices written to since the last fsync.
    unsynced: Vec<bool>,
    writes: u64,
    last_step: Option<Step>,
    /// This worker has found that nothing may be written any more.
    through: bool,
}

impl<'a> Worker<'a> {
    pub(super) fn new(run: &'a Run<'a>, number: u16) -> Result<Self, RunError> {
        let arguments = run.arguments;
        let seed = arguments.seed.unwrap_or_else(|| fastrand::u64(..));
        let extents: Vec<u64> = run.places.iter().map(super::Place::extents).collect();
        let workers = (u64::from(number), u64::from(arguments.workers));
        let walk = Walk::new(arguments.pattern, &arguments.sizes, &extents, workers, seed);
        let all = extents.iter().sum();
        let walk = walk.ok_or(RunError::Workers { workers: arguments.workers, extents: all })?;
        Ok(Self {
            run,
            number,
            walk,
            random: Rng::with_seed(seed ^ 0x5eed ^ u64::from(number)),
            buffer: vec![Unit::ZERO; EXTENT as usize],
            states: Vec::with_capacity(EXTENT as usize),
            pending: Vec::new(),
            unsynced: vec![false; run.places.len()],
            writes: 0,
            last_step: None,
            through: false,
        })
    }

    fn ending(&self) -> bool {
        self.run.ending.load(Ordering::Relaxed)
    }

    /// The first version of all own extents.
    pub(super) fn fill(&mut self) -> Result<(), RunError> {
        let run = self.run;
        let workers = u64::from(run.arguments.workers);
        for (device, place) in run.places.iter().enumerate() {
            let own = |extent: &u64| owner(device, *extent, workers) == u64::from(self.number);
            let extents: Vec<u64> = (0..place.extents()).filter(own).collect();
            for extent in extents {
                if self.ending() {
                    return self.sync();
                }
                self.write(Step { device, unit: extent * EXTENT, units: EXTENT })?;
            }
        }
        self.sync()
    }

    /// Writes and checks until the end.
    pub(super) fn work(&mut self) -> Result<(), RunError> {
        let run = self.run;
        let micros = || run.started.elapsed().as_micros() as u64;
        let workers = run.arguments.workers;
        let mut writes = Turn::new(run.arguments.rate, workers, micros());
        let mut looks = Turn::new(run.arguments.check_rate, workers, micros());
        let began = micros();
        while !self.ending() {
            let time = micros();
            let mut idle = true;
            if !self.through && self.is_work_time(time - began) && writes.is_due(time) {
                writes.done(self.next_write()?);
                idle = false;
            }
            if looks.is_due(time) {
                looks.done(self.next_look()?);
                idle = false;
            }
            if idle {
                std::thread::sleep(IDLE);
            }
        }
        self.sync()
    }

    /// Everything once, shared by all workers.
    pub(super) fn last_look(&mut self) -> Result<(), RunError> {
        while !self.ending() {
            let extent = self.run.sweep.fetch_add(1, Ordering::SeqCst);
            let Some(step) = self.extent(extent) else { break };
            self.look(step)?;
        }
        Ok(())
    }

    fn is_work_time(&self, micros: u64) -> bool {
        let (Some(work), Some(rest)) = (self.run.arguments.work, self.run.arguments.rest) else {
            return true;
        };
        let round = (work + rest).as_micros().max(1);
        u128::from(micros) % round < work.as_micros()
    }

    /// Writes what comes next, unless all is written that may be; how many units it was.
    fn next_write(&mut self) -> Result<u64, RunError> {
        let step = self.walk.next_step();
        let size = step.units * PAGE_SIZE;
        let take = |left: u64| (left > 0).then(|| left.saturating_sub(size));
        let left = &self.run.left;
        if left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take).is_err() {
            self.all_written()?;
            return Ok(0);
        }
        let percent = self.random.u8(..100);
        let discard = self.run.arguments.discard;
        if percent < discard {
            self.zero(step, Zeroing::Discard)?;
        } else if percent < discard + self.run.arguments.write_zeroes {
            self.zero(step, Zeroing::Write)?;
        } else {
            self.write(step)?;
        }
        self.writes += 1;
        self.last_step = Some(step);
        let every = self.run.arguments.fsync_every;
        if every > 0 && self.writes.is_multiple_of(every) {
            self.sync()?;
        }
        Ok(step.units)
    }

    /// The last worker to come here says so.
    fn all_written(&mut self) -> Result<(), RunError> {
        self.through = true;
        self.sync()?;
        let before = self.run.through.fetch_add(1, Ordering::SeqCst);
        if before + 1 == u64::from(self.run.arguments.workers) {
            self.run.report.line("all of --writes is written; checking on");
        }
        Ok(())
    }

    /// Gives the units of a step their next version.
    fn write(&mut self, step: Step) -> Result<(), RunError> {
        let run = self.run;
        let place = &run.places[step.device];
        let first = step.unit * SECTORS as u64;
        let stamp = Stamp {
            run: run.id,
            device: place.number(),
            writer: self.number,
            zeroes: zeroes(run.arguments),
            sector: first,
            generation: 0,
            nanos: now(),
            first,
            sectors: (step.units * SECTORS as u64) as u16,
            span: place.units(),
        };
        let stamp_all = |units: &mut [Unit]| {
            for (content, unit) in units.iter_mut().zip(step.unit..) {
                let generation = place.table().begin(unit);
                content.stamp(&Stamp { sector: unit * SECTORS as u64, generation, ..stamp });
            }
        };
        match place.store() {
            Store::Device(device) => {
                let buffer = &mut self.buffer[..step.units as usize];
                stamp_all(buffer);
                device.write(step.unit, buffer)?;
                self.finish(step, false);
            }
            Store::Memory(extents) => {
                let extent = &extents[(step.unit / EXTENT) as usize];
                let mut units = extent.lock().unwrap_or_else(PoisonError::into_inner);
                stamp_all(&mut units[(step.unit % EXTENT) as usize..][..step.units as usize]);
                self.finish(step, false);
            }
        }
        Ok(())
    }

    /// Makes zeroes of the units of a step.
    fn zero(&mut self, step: Step, how: Zeroing) -> Result<(), RunError> {
        let place = &self.run.places[step.device];
        for unit in step.unit..step.unit + step.units {
            place.table().begin(unit);
        }
        match place.store() {
            Store::Device(device) => {
                device.zero(step.unit, step.units, how)?;
                self.finish(step, true);
            }
            Store::Memory(extents) => {
                let extent = &extents[(step.unit / EXTENT) as usize];
                let mut units = extent.lock().unwrap_or_else(PoisonError::into_inner);
                units[(step.unit % EXTENT) as usize..][..step.units as usize].fill(Unit::ZERO);
                self.finish(step, true);
            }
        }
        Ok(())
    }

    /// The device says that it is done.
    fn finish(&mut self, step: Step, zero: bool) {
        let run = self.run;
        let place = &run.places[step.device];
        let millis = run.millis();
        for unit in step.unit..step.unit + step.units {
            let generation = place.table().state(unit).generation() + 1;
            place.table().finish(unit, generation, zero, millis);
            if place.is_device() && run.journal.is_some() {
                let record = Acknowledged { device: place.number(), unit, generation, zero };
                self.pending.push((step.device, record));
            }
        }
        self.unsynced[step.device] |= place.is_device();
        run.written.fetch_add(step.units * PAGE_SIZE, Ordering::Relaxed);
    }

    /// What this worker wrote is on its devices for good, and the journal says so.
    fn sync(&mut self) -> Result<(), RunError> {
        for (place, unsynced) in self.run.places.iter().zip(&mut self.unsynced) {
            if let (Store::Device(device), true) = (place.store(), std::mem::take(unsynced)) {
                device.sync()?;
            }
        }
        if let Some(journal) = &self.run.journal
            && !self.pending.is_empty()
        {
            let records: Vec<Acknowledged> =
                self.pending.drain(..).map(|(_, record)| record).collect();
            journal.lock().unwrap_or_else(PoisonError::into_inner).append(&records)?;
        }
        Ok(())
    }

    /// Looks at what it has just written, or else at the extent that is next in everybody's sweep;
    /// how many units it was.
    fn next_look(&mut self) -> Result<u64, RunError> {
        if let Some(step) = self.last_step.take()
            && self.random.bool()
        {
            self.look(step)?;
            return Ok(step.units);
        }
        let number = self.run.sweep.fetch_add(1, Ordering::SeqCst) % self.run.extents();
        if let Some(step) = self.extent(number) {
            self.look(step)?;
        }
        Ok(EXTENT)
    }

    /// The extent of this number, counted through all places.
    fn extent(&self, number: u64) -> Option<Step> {
        let mut rest = number;
        for (device, place) in self.run.places.iter().enumerate() {
            if rest < place.extents() {
                return Some(Step { device, unit: rest * EXTENT, units: EXTENT });
            }
            rest -= place.extents();
        }
        None
    }

    /// Reads the units of a step and compares them with what they should be.
    fn look(&mut self, step: Step) -> Result<(), RunError> {
        let run = self.run;
        let place = &run.places[step.device];
        let all = step.unit..step.unit + step.units;
        match place.store() {
            Store::Memory(extents) => {
                let extent = &extents[(step.unit / EXTENT) as usize];
                let units = extent.lock().unwrap_or_else(PoisonError::into_inner);
                let content = &units[(step.unit % EXTENT) as usize..][..step.units as usize];
                for (unit, content) in all.zip(content) {
                    run.look(step.device, unit, place.table().state(unit), content);
                }
            }
            Store::Device(device) => {
                self.states.clear();
                self.states.extend(all.clone().map(|unit| place.table().state(unit)));
                let buffer = &mut self.buffer[..step.units as usize];
                device.read(step.unit, buffer)?;
                let mut raced = 0;
                for ((unit, content), before) in all.zip(buffer.iter()).zip(&self.states) {
                    let after = place.table().state(unit);
                    if before.busy() || !before.same_version(after) {
                        raced += 1;
                    } else {
                        run.look(step.device, unit, after, content);
                    }
                }
                run.raced.fetch_add(raced, Ordering::Relaxed);
            }
        }
        run.checked.fetch_add(step.units * PAGE_SIZE, Ordering::Relaxed);
        Ok(())
    }
}
