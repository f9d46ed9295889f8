//! A destination that takes the place of one whose godwit was killed before the guest was stopped:
//! what is written down for it, and how it goes on.
//!
//! Post-copy has its own way: see `following`.

use godwit_disk::{Disk, DiskSink};

use super::fault::MadeUp;
use super::lanes::Lanes;
use super::offer::open_disks;
use super::record::Record;
use super::session::Session;
use super::{Destination, First, Notice, Options, Stage};
use crate::EngineError;
use crate::record::Place;
use crate::vm::DestinationVm;

/// What is written down for another godwit.
#[derive(Default)]
pub(super) struct Kept {
    place: Option<Place>,
    pub(super) record: Option<Record>,
}

impl Kept {
    /// Looks for what a godwit has left that was killed.
    pub(super) fn look(
        vm: &mut dyn DestinationVm,
        options: &Options,
    ) -> Result<(Self, Option<Record>), EngineError> {
        let Some(path) = options.record.as_ref().filter(|_| !options.reconnect.is_zero()) else {
            return Ok((Self::default(), None));
        };
        let mut place = Place::new(path);
        let found = place.find(|record: &Record| {
            let names = record.blocks.iter().map(|(name, _)| name.as_str()).collect();
            // What is asked was answered before, by a source that is not there.
            let asked = vm.offered(&names, &mut |_| Err("the source is not there".into()));
            match asked {
                Ok(()) if options.disks.is_none() && !record.disks.is_empty() => {
                    Some("disks move along, which have to be allowed again")
                }
                Ok(()) => {
                    let safe = options.post_copy_safe.as_deref();
                    let unfit = record.unfit(&vm.ram());
                    let unfit = unfit.or_else(|| record.copied_elsewhere(safe));
                    unfit.or_else(|| record.other_keys(&options.security))
                }
                Err(_) => Some("the machine does not take a guest with these RAM blocks"),
            }
        })?;
        Ok((Self { place: Some(place), record: None }, found))
    }

    /// Leaves what was found to another godwit, as this one cannot begin because of `error`; what
    /// to tell of it, with the name of the record.
    pub(super) fn leave(&mut self, error: EngineError) -> EngineError {
        match &mut self.place {
            Some(place) => {
                place.abandon();
                place
                    .refused(format!("{error} (once that is mended, the same command takes it up)"))
            }
            None => error,
        }
    }

    /// Writes down what is known by now.
    pub(super) fn write(&mut self, change: impl FnOnce(&mut Record)) -> Result<(), EngineError> {
        if let (Some(place), Some(record)) = (&mut self.place, &mut self.record) {
            change(record);
            place.write(record)?;
        }
        Ok(())
    }
}

/// The session of a godwit that was killed, with the disks that move along open again.
pub(super) type Begun<'a> = (Session<'a>, Vec<(Disk, Box<dyn DiskSink>)>);

/// Gets ready to go on with the `session` of `record`: whatever fails here is for the operator to
/// mend.
pub(super) fn get_ready<'a>(
    vm: &mut dyn DestinationVm,
    session: Session<'a>,
    record: &Record,
    options: &Options,
) -> Result<Begun<'a>, EngineError> {
    vm.heed(session.interrupt());
    // Those that the operator names now: what the one before was allowed is no matter.
    let disks = record.disks();
    let sinks = open_disks(vm, &disks, &options.disks)?;
    Ok((session, disks.into_iter().zip(sinks).collect()))
}

/// Waits for the source of the session of `record`, whose godwit here was killed.
pub(super) fn await_killed<'a>(
    vm: &mut dyn DestinationVm,
    (mut session, disks): Begun<'a>,
    record: &Record,
    options: &Options,
    notice: &mut dyn FnMut(&Notice),
) -> Result<(Session<'a>, First), EngineError> {
    let limit = options.reconnect;
    let ram = vm.ram();
    let order = record.order(&ram).ok_or(EngineError::Panicked("main"))?;
    notice(&Notice::Severed { why: EngineError::Killed.to_string(), limit });
    let back = session.await_return(vm, limit, notice)?;
    let back = back.ok_or_else(|| EngineError::Severed {
        cause: Box::new(EngineError::Killed),
        limit,
        last: None,
    })?;
    let made_up = MadeUp::of(options);
    let wish = (record.verified, record.features());
    let lanes = Lanes::restored(&session, &ram, (order, wish), disks, made_up);
    Ok((session, First::Back(back, Box::new(lanes), record.clone())))
}

impl Destination<'_> {
    /// Writes down what another godwit would need to go on.
    pub(super) fn keep_record(&mut self, stage: &Stage) -> Result<(), EngineError> {
        if let Some(record) = stage.lanes().and_then(|lanes| self.known_by(lanes)) {
            self.kept.record = Some(record);
            self.kept.write(|_| {})?;
        }
        Ok(())
    }

    /// What another godwit would know the migration by, if one may go on.
    pub(super) fn known_by(&self, lanes: &Lanes) -> Option<Record> {
        let record = self.session.known_by()?;
        let blocks = lanes.order().iter().map(|own| &self.ram[*own]);
        let blocks = blocks.map(|block| (block.name().to_owned(), block.pages().0)).collect();
        let disks = lanes.disks().iter().map(|disk| (disk.name.clone(), disk.size.0)).collect();
        let (running, verified) = (self.runs, self.measures.verified);
        let safe = self.safe.clone();
        Some(Record { running, verified, blocks, disks, safe, ..record })
    }
}
