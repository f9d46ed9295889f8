//! `godwit-stamp check`: all that a run stamped, looked at from outside.
//!
//! Keeps one promise: nothing is written. With the run's journal it is known which version each
//! unit must have at least, and a crash is told from corruption; without it, a unit is wrong if it
//! is damaged in itself, in another place than its own, or of two versions.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

use godwit_stamp::finding::{Expected, Fit, Wanted, diagnose};
use godwit_stamp::journal::Journal;
use godwit_stamp::pattern::EXTENT;
use godwit_stamp::sector::{Stamp, Unit};
use godwit_units::{ByteCount, PAGE_SIZE};
use serde_json::json;

use crate::arguments::CheckArguments;
use crate::device::{Device, DeviceError, Purpose, open_all};
use crate::journal::{self, JournalError};
use crate::report::{Outcome, Progress, Report, Signals};

/// Parts of 1 MiB that are looked at for the first stamp, twice.
const PROBES: u64 = 32;

/// Why there is no check.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CheckError {
    #[error("{0}")]
    Device(#[from] DeviceError),
    #[error("{0}")]
    Journal(#[from] JournalError),
    #[error(
        "{0}: not stamped: no sector that was looked at is of a run; stamp it by `godwit-stamp run \
         --destroy-data {0}`, or name the run's --journal if it should be"
    )]
    NotStamped(PathBuf),
    #[error(
        "--journal: that run had {journal} devices, and {named} are named: name them all, in the \
         run's order"
    )]
    Devices { journal: usize, named: usize },
    #[error("cannot catch signals: {0}")]
    Signals(io::Error),
}

/// What was stamped on a device, and by whom.
struct Stamped {
    run: u64,
    zeroes: bool,
    units: u64,
}

/// Does all of it.
pub(crate) fn check(arguments: &CheckArguments) -> Result<Outcome, CheckError> {
    let signals = Signals::catch().map_err(CheckError::Signals)?;
    let journal = arguments.journal.as_deref().map(journal::read).transpose()?;
    if let Some(journal) = &journal
        && journal.header.spans.len() != arguments.devices.len()
    {
        let (journal, named) = (journal.header.spans.len(), arguments.devices.len());
        return Err(CheckError::Devices { journal, named });
    }
    let devices = open_all(&arguments.devices, Purpose::Check, arguments.direct)?;
    let mut stamped = Vec::new();
    for (number, device) in devices.iter().enumerate() {
        let what = match &journal {
            Some(Journal { header, .. }) => {
                Stamped { run: header.run, zeroes: header.zeroes, units: header.spans[number] }
            }
            None => label(device)?,
        };
        device.must_hold(what.units)?;
        stamped.push(what);
    }
    // All devices are of one run: the first one's.
    if let Some(run) = stamped.first().map(|first| first.run) {
        stamped.iter_mut().for_each(|stamped| stamped.run = run);
    }
    let report = Report::new(arguments.json);
    let total = stamped.iter().map(|stamped| stamped.units * PAGE_SIZE).sum();
    let mut look = Look {
        report,
        journal: journal.as_ref(),
        progress: Progress::new("checking", total),
        checked: 0,
        under_way: 0,
        unknown: 0,
    };
    for ((number, device), stamped) in (0_u16..).zip(&devices).zip(&stamped) {
        look.device(number, device, stamped, &signals)?;
    }
    Ok(look.result(&signals))
}

/// What most of the stamps say in the first part that has any.
fn label(device: &Device) -> Result<Stamped, CheckError> {
    let mut units = vec![Unit::ZERO; EXTENT as usize];
    // The first parts, since a run may use no more, and others all over the device.
    let (extents, stride) = (device.extents(), device.extents().div_ceil(PROBES));
    let spread = (0..PROBES).map(|probe| probe * stride);
    for extent in (0..PROBES).chain(spread).filter(|extent| *extent < extents) {
        device.read(extent * EXTENT, &mut units)?;
        let sectors = units.iter().flat_map(|unit| &unit.0);
        let mut said = BTreeMap::new();
        for Stamp { run, zeroes, span, .. } in sectors.filter_map(|sector| sector.read().ok()) {
            *said.entry((run, zeroes, span)).or_insert(0) += 1;
        }
        let most = said.into_iter().max_by_key(|(_, count)| *count);
        if let Some(((run, zeroes, units), _)) = most {
            return Ok(Stamped { run, zeroes, units });
        }
    }
    Err(CheckError::NotStamped(device.path().to_owned()))
}

struct Look<'a> {
    report: Report,
    journal: Option<&'a Journal>,
    progress: Progress,
    checked: u64,
    /// Units with writes that were under way when the run was cut off.
    under_way: u64,
    /// Units of which nothing was acknowledged.
    unknown: u64,
}

impl Look<'_> {
    fn device(
        &mut self,
        number: u16,
        device: &Device,
        stamped: &Stamped,
        signals: &Signals,
    ) -> Result<(), CheckError> {
        let name = device.to_string();
        let mut buffer = vec![Unit::ZERO; EXTENT as usize];
        let mut at = 0;
        while at < stamped.units && !signals.any() {
            let count = (stamped.units - at).min(EXTENT);
            let units = &mut buffer[..count as usize];
            device.read(at, units)?;
            for (unit, content) in (at..).zip(units.iter()) {
                self.unit(number, &name, stamped, unit, content);
            }
            at += count;
            self.checked += count * PAGE_SIZE;
            self.progress.tell(self.checked);
        }
        Ok(())
    }

    fn unit(&mut self, device: u16, name: &str, stamped: &Stamped, unit: u64, content: &Unit) {
        let Some(wanted) = self.wanted(device, unit) else {
            self.unknown += 1;
            return;
        };
        let (run, zeroes) = (stamped.run, stamped.zeroes);
        let zeroes_before = self.zeroes_before(device, unit, wanted);
        let expected = Expected { run, device, unit, zeroes, wanted, zeroes_before, nanos: None };
        match diagnose(content, &expected) {
            Ok(Fit::Exact) => {}
            Ok(Fit::UnderWay) => self.under_way += 1,
            Err(finding) => self.report.bug(&finding, name),
        }
    }

    fn wanted(&self, device: u16, unit: u64) -> Option<Wanted> {
        let Some(journal) = self.journal else { return Some(Wanted::Any) };
        let &(generation, zero) = journal.acknowledged.get(&(device, unit))?;
        Some(if journal.ended {
            Wanted::Exactly { generation, zero, seen: false }
        } else {
            Wanted::AtLeast { generation, zero }
        })
    }

    /// The last zeroes of a unit before the version that it should be.
    fn zeroes_before(&self, device: u16, unit: u64, wanted: Wanted) -> Option<u64> {
        let Wanted::Exactly { generation, .. } = wanted else { return None };
        let zeroed = *self.journal?.zeroed.get(&(device, unit))?;
        (zeroed < generation).then_some(zeroed)
    }

    fn result(mut self, signals: &Signals) -> Outcome {
        self.progress.done();
        let outcome = Outcome::of(self.report.bugs(), signals);
        let size = |units: u64| ByteCount(units * PAGE_SIZE);
        let mut line = format!("checked {}", ByteCount(self.checked));
        if self.under_way > 0 {
            let text = ", of which the run was cut off while it wrote ";
            line += &format!("{text}{}", size(self.under_way));
        }
        if self.unknown > 0 {
            line += &format!(", and never had {} acknowledged", size(self.unknown));
        }
        let facts = json!({
            "checked_bytes": self.checked,
            "under_way_bytes": size(self.under_way).0,
            "never_acknowledged_bytes": size(self.unknown).0,
            "journal": self.journal.is_some(),
            "run_ended_by_itself": self.journal.map(|journal| journal.ended),
        });
        self.report.result(outcome, &line, facts);
        outcome
    }
}
