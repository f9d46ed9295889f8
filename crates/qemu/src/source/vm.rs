//! The QEMU as the engine sees it.

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_engine::Interrupt;
use godwit_engine::vm::{Brake, DirectIo, DiskVm, LatePackets, SourceVm, SwitchoverCosts, VmError};
use godwit_memory::RamBlock;
use godwit_track::{DirtyTracker, Untracked};

use super::back_ends::BackEnds;
use super::{
    END_LIMIT, FD_NAME, OWN_BLOCKS, QemuSource, Releasing, SAVE_LIMIT, SILENT, failure_words,
    migration_event,
};
use crate::cards::Outlets;
use crate::compare::Realized;
use crate::device_state::Prepared;
use crate::guard::{Left, Stage};
use crate::libvirt::{QUESTION, SourceDomain};
use crate::monitor::commands::{MigrateContinue, Quit};
use crate::monitor::{QmpError, Seen};
use crate::ram::StateBy;
use crate::settings::MigrationSettings;
use crate::{QemuError, compare, device_ram, guard, post_copy, start, userfaultfd};

impl SourceVm for QemuSource {
    fn machine(&self) -> &'static str {
        "qemu"
    }

    fn ram(&self) -> Arc<Vec<RamBlock>> {
        Arc::clone(self.offered())
    }

    fn was_running(&self) -> bool {
        self.was_running
    }

    fn has_ended(&self) -> bool {
        self.machine.process.has_ended()
    }

    fn befallen(&mut self) -> Option<String> {
        self.take_events();
        let Self { fate, machine, .. } = self;
        let ended = machine.process.has_ended();
        // An answer that does not come is found out by whoever needs one.
        fate.words(ended, || machine.run_state().unwrap_or_default())
    }

    fn heed(&mut self, interrupt: &Interrupt) {
        self.machine.qmp.heed(interrupt);
    }

    fn answer(&mut self, question: &[u8]) -> Result<Vec<u8>, VmError> {
        if question == QUESTION {
            return self.describe();
        }
        if question == start::QUESTION {
            return self.describe_qemu();
        }
        let moving: Vec<String> = self.moving.iter().map(|disk| disk.node.clone()).collect();
        let terms = (&self.terms, &*moving);
        compare::answer(&mut self.machine, &mut self.realized, question, terms)
    }

    fn foresee_questions(&mut self) {
        // What fails is asked for again, and told of then.
        let _ = Realized::find(&mut self.realized, &mut *self.machine.qmp);
    }

    fn start_tracking(&mut self) -> Result<Arc<dyn DirtyTracker>, VmError> {
        let ram = Arc::clone(self.offered());
        if ram.is_empty() {
            return Ok(Arc::new(Untracked));
        }
        let tracker = Arc::new(userfaultfd::start_tracking(&mut self.machine, &ram)?);
        self.tracking_stop = tracker.attachment().stopped();
        self.tracker = Arc::downgrade(&tracker);
        match &mut self.back_ends {
            Some(back_ends) => Ok(back_ends.track(tracker, &ram)?),
            None => Ok(tracker),
        }
    }

    fn can_go_untracked(&self) -> bool {
        // Back ends have to be told to log what they write. Where QEMU has somebody else's
        // userfaultfd, or another godwit tracks it, attaching is refused with the reason.
        let pid = self.machine.pid;
        let alone =
            post_copy::has_any_userfaultfd(pid) == Some(false) && guard::in_work(pid).is_none();
        alone && self.back_ends.is_none() && !self.direct_io
    }

    fn tracking_stop(&self) -> Duration {
        self.tracking_stop
    }

    fn switchover_costs(&self) -> SwitchoverCosts {
        // What is looked at again is looked at by the same commands, or by fewer.
        let processes =
            if self.processes_are_due() { self.processes_looked } else { Duration::ZERO };
        let own_blocks = match self.state_by {
            StateBy::Migration => OWN_BLOCKS,
            StateBy::Saving => Duration::ZERO,
        };
        let lead = self.looked + processes + own_blocks;
        let bytes = device_ram::allocated(&self.device_ram);
        SwitchoverCosts { lead, bytes, ..SwitchoverCosts::default() }
    }

    fn open_state(&mut self) -> Result<Box<dyn Read + Send>, VmError> {
        self.check_processes()?;
        if let Some(back_ends) = &mut self.back_ends {
            back_ends.prepare(&mut self.machine)?;
        }
        if let Some(guard) = &mut self.guard {
            guard.renew(&self.machine)?;
        }
        if self.state_by == StateBy::Saving {
            // Also where it is handed over later: then there is no time for that.
            self.note(|left| left.fd_set = true)?;
            self.has_fd_set = true;
            let keeps = self.machine.qmp.keeps_descriptors();
            let (prepared, state) = Prepared::new(&mut self.machine, keeps)?;
            self.prepared = Some(prepared);
            return Ok(Box::new(state));
        }
        let (ours, theirs) = UnixStream::pair()
            .map_err(|source| QemuError::System { step: "socketpair", source })?;
        let handle =
            ours.try_clone().map_err(|source| QemuError::System { step: "dup", source })?;
        let settings = MigrationSettings::look(&mut *self.machine.qmp, None)?;
        self.note(|left| left.settings = Some(settings.clone()))?;
        let settings = self.settings.insert(settings);
        settings.apply(&mut *self.machine.qmp).map_err(QemuError::from)?;
        self.machine.qmp.pass_fd(FD_NAME, theirs.as_fd())?;
        self.state = Some(handle);
        Ok(Box::new(ours))
    }

    fn stop(&mut self) -> Result<Instant, VmError> {
        let stopped = self.stop_guest();
        self.remove_throttle();
        let stopped = stopped?;
        self.await_back_ends()?;
        Ok(stopped)
    }

    fn release_state(&mut self) -> Result<(), VmError> {
        self.begin_release()?;
        self.await_release()
    }

    fn begin_release(&mut self) -> Result<(), VmError> {
        self.released = true;
        self.releasing = Some(match self.state_by {
            StateBy::Saving => {
                // It was prepared when the stream was opened.
                let prepared = self.prepared.take();
                let prepared = prepared.ok_or(QemuError::Changed("the devices were saved"))?;
                Releasing::Saving(prepared.save(&mut self.machine)?)
            }
            StateBy::Migration => {
                let go_on = MigrateContinue { state: "pre-switchover" };
                Releasing::Continuing(self.machine.qmp.start(&go_on)?)
            }
        });
        // An answer that nobody waits for is lost with a connection that is let go of.
        if self.machine.qmp.is_lasting() { Ok(()) } else { self.await_release() }
    }

    fn await_release(&mut self) -> Result<(), VmError> {
        // Until its devices are saved its monitor may answer nothing.
        match self.releasing.take() {
            None => {}
            Some(Releasing::Continuing(told)) => {
                let limit = self.machine.qmp.limit();
                self.machine.qmp.answer(&told, limit)?;
            }
            Some(Releasing::Saving(saving)) => {
                let Self { machine, device_ram, loader, .. } = self;
                saving.finish(machine, device_ram, *loader, SAVE_LIMIT)?;
            }
        }
        Ok(())
    }

    fn state_saved(&mut self) -> Result<(), VmError> {
        // All memory has been looked at for the last time.
        self.back_ends.as_ref().map_or(Ok(()), BackEnds::check_intact)?;
        if self.state_by == StateBy::Saving {
            // It was saved before it was passed on.
            self.take_events();
            return Ok(());
        }
        let Self { machine, fate, .. } = self;
        let qmp = &mut *machine.qmp;
        let reached = qmp.watch("the end of its migration", SAVE_LIMIT, &mut |event| {
            fate.take(event);
            let ended = migration_event(event);
            match ended.as_str() {
                "failed" | "completed" | "cancelled" => Seen::Awaited,
                _ => Seen::TakenIn,
            }
        })?;
        match migration_event(&reached).as_str() {
            "completed" => Ok(()),
            _ => Err(QemuError::State { action: "save", words: failure_words(qmp, SILENT) }.into()),
        }
    }

    fn handing_over(&mut self) -> Result<(), VmError> {
        // The lock stays, wherever the guest is then.
        Ok(self.note(|left| (left.stage, left.lock) = (Stage::HandingOver, None))?)
    }

    fn resume(&mut self) -> Result<(), VmError> {
        self.remove_throttle();
        if self.stopping {
            // It may have been handed over, and was discarded there.
            let lock = self.proxmox.clone().filter(|_| self.locked);
            self.note_if_possible(|left| (left.stage, left.lock) = (Stage::Stopping, lock));
        }
        // A QEMU that answers nothing does not run the guest either.
        let back = self.bring_back().and_then(|()| Ok(self.machine.run_state().map(drop)?));
        if let Err(QemuError::Qmp(QmpError::Closed { .. })) = back {
            // A process closes its sockets a moment before it has ended, and has_ended is asked
            // next.
            let _ = self.machine.process.ends_within(END_LIMIT);
        }
        Ok(back?)
    }

    fn retire(&mut self, keep: bool) -> Result<(), VmError> {
        self.remove_throttle();
        self.state = None;
        if keep {
            self.end_disk_tracking()?;
            self.lift_disk_limits()?;
            self.restore_settings()?;
            self.forget_fd_set()?;
            // It stays stopped, as the operator wanted, and nothing is left to be done.
            self.note_if_possible(|left| left.stage = Stage::Copying);
            return Ok(self.clear_left()?);
        }
        match self.machine.qmp.run(&Quit) {
            Ok(_) | Err(QmpError::Closed { .. }) => {
                // It is about to end, and whatever was changed in it.
                (self.settings, self.has_fd_set) = (None, false);
                self.note_if_possible(|left| *left = Left::at(Stage::Copying, false));
                Ok(self.domain.as_ref().map_or(Ok(()), SourceDomain::leave)?)
            }
            Err(error) => Err(error.into()),
        }
    }

    fn brake(&mut self) -> Option<&mut dyn Brake> {
        Some(self)
    }

    fn moving_disks(&mut self) -> Option<&mut dyn DiskVm> {
        if !self.moving.is_empty() { Some(self) } else { None }
    }

    fn late_packets(&mut self) -> Option<&mut dyn LatePackets> {
        Some(self)
    }

    fn direct_io(&mut self) -> Option<&mut dyn DirectIo> {
        let late = self.back_ends.as_ref().is_some_and(BackEnds::land_late);
        // What lands late lands in memory that stays.
        let stays = self.in_place.as_ref().is_some_and(|memory| !memory.is_copied());
        if !stays && (self.direct_io || late) { Some(self) } else { None }
    }
}

impl LatePackets for QemuSource {
    fn find(&mut self) {
        self.outlets = Some(Outlets::of(&mut *self.machine.qmp, self.machine.pid));
    }

    fn next(&mut self, wait: Duration) -> Option<Vec<u8>> {
        self.outlets.as_mut()?.next(wait)
    }

    fn end(&mut self) {
        self.outlets = None;
    }
}
