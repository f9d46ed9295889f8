//! One thread for each VM, which moves it until all moves are made.
//!
//! Keeps two promises: a move that fails says what was wrong and how it is made again, and the VM
//! is replaced by a new one; and whoever is interrupted ends what it started, and calls no failure
//! what the interruption has broken.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use godwit_faults::cell;
use godwit_faults::rig::Rig;
use serde_json::Value;

use crate::draw::{Drawn, Strikes, draw};
use crate::machine::Machine;
use crate::report::{Asked, Row, Verdict};
use crate::table::Table;

/// How often a VM in a row may fail to come up, or to move.
const PATIENCE: u32 = 3;

/// When it is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// When so many moves came to a good end.
    Moves(usize),
    /// When each VM has made so many.
    Each(usize),
    /// When so much time has passed.
    Time(Duration),
}

/// What is done.
pub struct Soak {
    /// What was asked for.
    pub asked: Asked,
    /// When it is over.
    pub until: Until,
    /// The number of each VM's first move.
    pub from: u64,
    /// The faults that strike.
    pub strikes: Strikes,
    /// The lines that are shown.
    pub table: Table,
    /// Set by whoever wants it to end, before anything is ended.
    pub interrupted: Arc<AtomicBool>,
    /// When it began.
    pub since: Instant,
    /// Of each VM, whether it makes no more moves.
    gone: Vec<AtomicBool>,
    rows: Mutex<Vec<Row>>,
}

impl Soak {
    /// One that begins now: from which move of each VM on, and how many of a hundred moves are
    /// struck by which faults. It ends when `interrupted` is set.
    #[must_use]
    pub fn new(
        asked: Asked,
        until: Until,
        (from, strikes): (u64, Strikes),
        interrupted: Arc<AtomicBool>,
    ) -> Self {
        let names: Vec<&'static str> = asked.vms.iter().map(|vm| vm.name).collect();
        let gone = names.iter().map(|_| AtomicBool::new(false)).collect();
        let wanted = match until {
            Until::Moves(moves) => format!("{moves} moves"),
            Until::Each(moves) => format!("{} moves", moves * names.len()),
            Until::Time(time) => godwit_units::format_duration(time),
        };
        Self {
            table: Table::new(&names, wanted),
            asked,
            until,
            from,
            strikes,
            interrupted,
            since: Instant::now(),
            gone,
            rows: Mutex::default(),
        }
    }

    /// What was done so far.
    #[must_use]
    pub fn rows(&self) -> Vec<Row> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether all is done, or somebody wants it to end. Of moves each VM tries a share at least,
    /// so that quick ones do not make all of them; they go on until the others have theirs.
    fn is_over(&self) -> bool {
        let (lines, tries) = (self.table.moves(), self.table.tries());
        let done = match self.until {
            Until::Moves(moves) => {
                let share = moves / (2 * lines.len()).max(1);
                lines.iter().sum::<usize>() >= moves
                    && tries
                        .iter()
                        .zip(&self.gone)
                        .all(|(own, gone)| *own >= share || gone.load(Ordering::Relaxed))
            }
            // Each ends by itself: see [`Self::has_done_its_part`].
            Until::Each(_) => false,
            Until::Time(time) => self.since.elapsed() >= time,
        };
        done || self.interrupted.load(Ordering::Relaxed)
    }

    /// Whether the VM at `place` has made all the moves that are wanted of it.
    fn has_done_its_part(&self, place: usize) -> bool {
        match self.until {
            Until::Each(moves) => self.table.moves().get(place).is_none_or(|own| *own >= moves),
            Until::Moves(_) | Until::Time(_) => false,
        }
    }

    /// Moves the VM at `place` to and fro until all is over.
    pub fn work(&self, place: usize) {
        let Some(machine) = self.asked.vms.get(place) else { return };
        let (mut rig, mut failures) = (None, 0);
        // What is got wrong on purpose fails each time.
        let patience = if self.asked.defect.is_some() { 1 } else { PATIENCE };
        for number in self.from.. {
            if self.is_over() || self.has_done_its_part(place) || failures == patience {
                break;
            }
            let row = self.one(place, machine, number, &mut rig);
            // What it ran in was taken away.
            let unfinished = matches!(row.verdict, Verdict::Failed | Verdict::Skipped);
            if unfinished && self.interrupted.load(Ordering::Relaxed) {
                break;
            }
            failures = if row.verdict == Verdict::Failed { failures + 1 } else { 0 };
            self.table.add(place, &row);
            let skipped = row.verdict == Verdict::Skipped;
            self.rows.lock().unwrap_or_else(PoisonError::into_inner).push(row);
            if skipped {
                break;
            }
        }
        self.gone[place].store(true, Ordering::Relaxed);
        self.table.doing(place, "ending");
        drop(rig);
        self.table.doing(place, "ended");
    }

    fn one(
        &self,
        place: usize,
        machine: &Machine,
        number: u64,
        rig: &mut Option<Box<dyn Rig>>,
    ) -> Row {
        let since = Instant::now();
        let mut drawn = draw(self.asked.seed, machine, number, &self.strikes);
        if let Some(defect) = self.asked.defect {
            drawn.replace(defect.migrate);
        }
        let mut row = self.row(machine, number, &drawn);
        if rig.is_none() {
            self.table.doing(place, "starting");
        }
        let told = match rig
            .take()
            .map(Some)
            .map_or_else(|| machine.adapter.rig_with(&machine.outfit), Ok)
        {
            Ok(Some(mut vms)) => {
                self.table.doing(place, &row.options);
                let told = self.apply(vms.as_mut(), &drawn);
                *rig = Some(vms);
                told
            }
            Ok(None) => {
                row.verdict = Verdict::Skipped;
                return row;
            }
            Err(problem) => Err(problem),
        };
        match told {
            Ok(last) if drawn.strike.is_none() => {
                row.verdict = Verdict::Moved;
                row.downtime_ms = last["downtime_ms"].as_f64().unwrap_or_default();
            }
            Ok(_) => row.verdict = Verdict::Survived,
            Err(problem) => row.evidence = format!("{problem:#}"),
        }
        if row.evidence.contains("\"error\":\"not converging") {
            row.verdict = self.stayed(place, rig, &mut row.evidence);
        }
        // What has failed may be damaged.
        if row.verdict == Verdict::Failed {
            *rig = None;
        }
        row.bug = row.evidence.contains("BUG");
        row.seconds = since.elapsed().as_secs_f64();
        row
    }

    /// Looks whether a guest that could not be moved within its limits runs on at the source as if
    /// nothing had been.
    fn stayed(
        &self,
        place: usize,
        rig: &mut Option<Box<dyn Rig>>,
        evidence: &mut String,
    ) -> Verdict {
        self.table.doing(place, "giving up");
        let Some(vms) = rig else { return Verdict::Failed };
        match vms.check_stayed() {
            Ok(()) => Verdict::Stayed,
            Err(problem) => {
                *evidence = format!("it gave up, and behind that: {problem:#}; {evidence}");
                Verdict::Failed
            }
        }
    }

    fn apply(&self, rig: &mut dyn Rig, drawn: &Drawn) -> anyhow::Result<Value> {
        let Some(strike) = &drawn.strike else {
            let receives = self.asked.defect.map_or(&[][..], |defect| defect.receive);
            return cell::move_verified(rig, &drawn.options, receives);
        };
        let mut rng = fastrand::Rng::with_seed(strike.seed);
        let verdict = cell::run(rig, &self.strikes.points[strike.point], strike.moment, &mut rng)?;
        anyhow::ensure!(verdict.came != cell::Came::Lost, "the guest was lost with its VM");
        Ok(Value::Null)
    }

    fn row(&self, machine: &Machine, number: u64, drawn: &Drawn) -> Row {
        let options = match &drawn.strike {
            None => drawn.options.join(" "),
            Some(strike) => {
                let point = &self.strikes.points[strike.point];
                let phase = strike.moment.phase;
                format!("fault {}: {} {} at {phase}", point.number, point.place, point.what)
            }
        };
        let faults = self.strikes.words();
        let defect = match self.asked.defect {
            None => String::new(),
            Some(defect) => format!(" --defect {}", defect.name),
        };
        let repeat = format!(
            "make soak SOAK='--seed {} --only {} --from {number} --moves 1{faults}{defect}'",
            self.asked.seed, machine.name
        );
        Row {
            vm: machine.name.to_owned(),
            number,
            options,
            verdict: Verdict::Failed,
            bug: false,
            seconds: 0.0,
            downtime_ms: 0.0,
            evidence: String::new(),
            repeat,
        }
    }
}
