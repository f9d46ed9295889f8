//! From the moment that both machines are ready to the handover: the guest is stopped, its last
//! pages and its state follow, and it is given away.
//!
//! Invariant: unless digests are compared, no device state is sent before the end of the last
//! round.

use std::sync::Arc;

use godwit_protocol::source::Input;
use godwit_wire::{MISSING_LIMIT, Message};

use super::copying::Copying;
use super::fault::Fault;
use super::lanes::Lanes;
use super::meter::Part;
use super::serving::Serving;
use super::state_relay::StateRelay;
use super::{BeforeSwitchover, Options, Source, Verify};
use crate::address::Stream;
use crate::missing::messages;
use crate::report::Stage;
use crate::{EngineError, limits};

pub(super) struct Switchover {
    copying: Copying,
    relay: StateRelay,
    /// The connection for pages that somebody waits for, where such follow the guest; and who sends
    /// them, from when it was said which these are.
    urgent: Option<(Stream, Stream)>,
    serving: Option<Serving>,
}

impl Switchover {
    pub(super) fn new(copying: Copying, relay: StateRelay) -> Self {
        Self { copying, relay, urgent: None, serving: None }
    }

    /// The rounds, which go on until the guest is stopped.
    pub(super) fn copying(&mut self) -> &mut Copying {
        &mut self.copying
    }

    pub(super) fn stop_guest(&mut self, source: &mut Source<'_>) -> Result<Input, EngineError> {
        if source.leaves {
            // As much as can be of what the guest would stand still for.
            source.write_follow_record()?;
            self.urgent = Some(self.copying.connect_urgent(source)?);
        }
        self.copying.lanes().hurry();
        source.keep_packets();
        let stopped = source.vm.stop().map_err(EngineError::Vm)?;
        source.meter.guest_stopped(stopped);
        self.copying.guest_stopped(source);
        source.session.hold(source.vm, Fault::HoldStopped)?;
        Ok(Input::GuestStopped)
    }

    /// Lets the machine save its devices. Unless digests were compared and all pages are in place
    /// by now, what it saves is held back until the last round has ended.
    pub(super) fn release_state(&mut self, source: &mut Source<'_>) -> Result<(), EngineError> {
        if source.options.verify == Verify::No {
            self.relay.hold();
        }
        if source.leaves {
            // No disks move then.
            return source.vm.begin_release().map_err(EngineError::Vm);
        }
        self.copying.release_state(source)
    }

    pub(super) fn finish_last_round(
        &mut self,
        source: &mut Source<'_>,
        round: u32,
    ) -> Result<Input, EngineError> {
        self.copying.finish_last(source, round, &self.relay)
    }

    /// Ends the last round, says which pages are left, and answers the destination from here on
    /// when it asks for one.
    pub(super) fn list_missing(
        &mut self,
        source: &mut Source<'_>,
        round: u32,
    ) -> Result<Input, EngineError> {
        let mut missing = self.copying.finish_listing(source, round)?;
        let runs = missing.iter().map(|pages| pages.runs().collect()).collect();
        let said = messages(runs, MISSING_LIMIT);
        for message in &said {
            if let Message::Missing { block, runs, .. } = message {
                for run in runs {
                    missing[*block as usize].set(*run);
                }
            }
        }
        if source.options.post_copy_safe.is_some() {
            // That may take longer than a monitor keeps an answer.
            source.vm.await_release().map_err(EngineError::Vm)?;
            source.meter.part_ended(Part::Save);
            source.make_safe(&missing)?;
            source.meter.part_ended(Part::Safe);
        }
        let urgent = self.urgent.take().ok_or(EngineError::Panicked("main"))?;
        // The destination may ask as soon as it has heard.
        self.serving = Some(Serving::begin(source, missing, self.copying.lanes(), urgent)?);
        said.iter().try_for_each(|message| source.session.say(message))?;
        self.relay.open();
        Ok(Input::MissingListed)
    }

    /// The guest runs at the destination, and what is left follows: who sends it, and the channels
    /// over which.
    pub(super) fn into_serving(
        self,
        source: &mut Source<'_>,
    ) -> Result<(Serving, Lanes), EngineError> {
        let totals = self.copying.totals(source);
        source.meter.finish(totals);
        self.relay.end();
        self.relay.join();
        let serving = self.serving.ok_or(EngineError::Panicked("main"))?;
        Ok((serving, self.copying.into_lanes()))
    }

    pub(super) fn compare_digests(
        &mut self,
        source: &mut Source<'_>,
    ) -> Result<Input, EngineError> {
        let compared = self.copying.compare_digests(source);
        source.meter.part_ended(Part::Verify);
        compared?;
        source.meter.verified();
        Ok(Input::DigestsEqual)
    }

    /// Waits until the device state was sent to its end.
    pub(super) fn finish_state(&mut self, source: &mut Source<'_>) -> Result<Input, EngineError> {
        let round = source.meter.last_round();
        self.copying.report(source, Stage::Handover, round, false);
        if source.leaves {
            source.vm.await_release().map_err(EngineError::Vm)?;
        }
        let bytes = source.session.await_state(source.vm)?;
        source.meter.state_passed(bytes);
        source.vm.state_saved().map_err(EngineError::Vm)?;
        source.session.state_is_saved();
        // Guest memory is not looked at again: QEMU's own migration, too, sends the last of RAM
        // before it saves devices, so saving them must not write it
        // (qemu_savevm_state_complete_precopy).
        source.session.say(&Message::DeviceStateEnd)?;
        source.meter.part_ended(Part::Save);
        Ok(Input::StateSent)
    }

    /// Ends all channels, and then the control connection and with it the relay.
    pub(super) fn end(self, source: &mut Source<'_>) {
        self.relay.end();
        drop(self.serving);
        drop(self.copying);
        source.session.end();
        self.relay.join();
    }
}

/// Whether both machines may get ready while the policy still makes rounds in search of less
/// downtime: what is written meanwhile goes over in one of these, and none has to follow the last
/// of them for its sake. Not where more is done then than that and takes its time or has its: what
/// was placed so far is read back; somebody else acts, right before the guest is stopped; `disks`
/// move, whose direct I/O is drained.
pub(super) fn prepares_early(options: &Options, disks: bool) -> bool {
    options.verify == Verify::No && options.before_switchover.is_none() && !disks
}

/// Gets both machines ready while the guest runs, so that as little as possible is left to do when
/// it is stopped. Returns also what the device state will come through.
pub(super) fn prepare(
    source: &mut Source<'_>,
    copying: &mut Copying,
) -> Result<(StateRelay, Input), EngineError> {
    let before = source.options.before_switchover.as_ref();
    let before = before.map(BeforeSwitchover::start).transpose()?;
    source.session.say(&Message::Prepare)?;
    source.find_cards();
    copying.open_state(source.vm)?;
    let what = "the destination to get ready";
    source.session.await_message(source.vm, what, limits::ANSWER, |message| {
        (*message == Message::Prepared).then_some(())
    })?;
    before.map_or(Ok(()), |before| before.wait(source))?;
    // A guest that stands still has written nothing meanwhile, one that is held back need not be so
    // for longer, and who wants it stopped now need not wait for disks.
    let in_haste = copying.is_urgent() || source.leaves || !source.vm.was_running();
    if in_haste {
        copying.close(source);
    } else {
        copying.drain(source)?;
    }
    let control = Arc::clone(source.session.control()?);
    let stream = copying.take_state().ok_or(EngineError::Panicked("main"))?;
    let relay = StateRelay::start(stream, control, source.session.for_state())?;
    Ok((relay, if in_haste { Input::PreparedInHaste } else { Input::Prepared }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_more_is_done_than_to_get_ready_that_is_not_done_early() {
        let options = |verify, before_switchover| Options {
            verify,
            before_switchover,
            ..Options::new("west:4444".parse().unwrap())
        };
        assert!(prepares_early(&options(Verify::No, None), false));
        assert!(!prepares_early(&options(Verify::No, None), true));
        for verify in [Verify::Arrival, Verify::Live, Verify::Stopped] {
            assert!(!prepares_early(&options(verify, None), false));
        }
        let tell = BeforeSwitchover::new(|| Ok(()));
        assert!(!prepares_early(&options(Verify::No, Some(tell)), false));
    }
}
