//! Post-copy at a source whose godwit was killed: another one sends what is missing.
//!
//! Invariant: whether the guest runs at the destination is asked first. Where it was discarded
//! there it is the source's again, and is run.

use super::record::Record;
use super::serving::Serving;
use super::{Options, Source, Stage};
use crate::handle::MigrationHandle;
use crate::record::Place;
use crate::report::{Measures, Progress};
use crate::vm::SourceVm;
use crate::{EngineError, Failure, Phase, Survivor, remainder};
use godwit_protocol::source::Input;

/// Goes on for a godwit that was killed when the guest of `vm` ran at the destination, or was about
/// to, without all of its pages: sends what is missing there. What that one has left is at
/// `options.follow_record`. The guest of `vm` is stopped, and was running before
/// ([`SourceVm::was_running`]); nothing is asked of it but its memory and, at the end,
/// [`SourceVm::retire`], or [`SourceVm::resume`] where the destination says that it has discarded
/// the guest. Where nobody answers, it tries without end; who cancels it then leaves all as it was.
///
/// # Errors
/// Says what failed, and where the guest is. Where nobody knows that, what was left stays for
/// another attempt.
///
/// ```
/// use std::path::PathBuf;
/// use godwit_engine::handle::MigrationHandle;
/// use godwit_engine::source::{Options, follow};
/// use godwit_engine::vm::SourceVm;
/// use godwit_engine::Failure;
///
/// fn go_on(vm: &mut dyn SourceVm, options: Options, left: PathBuf) -> Result<(), Failure> {
///     let options = Options { follow_record: Some(left), ..options };
///     let handle = MigrationHandle::default();
///     let measures = follow(vm, &options, &handle, &mut |progress| println!("{progress:?}"))?;
///     println!("all of it is there: {:?}", measures.post_copy);
///     Ok(())
/// }
/// ```
pub fn follow(
    vm: &mut dyn SourceVm,
    options: &Options,
    handle: &MigrationHandle,
    progress: &mut dyn FnMut(&Progress),
) -> Result<Measures, Failure> {
    let unheard = |cause| Failure { phase: Phase::Handover, survivor: Survivor::Unknown, cause };
    let new = Source::new(vm, options, handle, progress);
    let (mut source, setup) = new.map_err(|error| unheard(EngineError::Random(error)))?;
    match source.take_up_left() {
        Ok(()) => {
            let serving = Serving::for_another(&source, &setup.own);
            source.run(Stage::Serving(Box::new(serving)), Input::Follow)
        }
        Err(cause) => {
            source.leave_to_another();
            Err(unheard(cause))
        }
    }
}

impl Source<'_> {
    /// Before the guest can run at the destination without all of its pages: writes down what
    /// another godwit needs to send them.
    pub(super) fn write_follow_record(&mut self) -> Result<(), EngineError> {
        let Some(path) = &self.options.follow_record else { return Ok(()) };
        let (told, shown) = self.session.known_by();
        let how = (self.vm.was_running(), self.options.post_copy_safe.as_deref());
        let record = Record::new(told, shown, &self.common, how, (&self.ram, &[]));
        let mut place = Place::of_left(path);
        let record = record.behind(self.restarts).begun_with(&self.options.security);
        place.write(&record)?;
        self.followed = Some((place, record));
        Ok(())
    }

    /// The guest is known to run at the destination: whoever looks at what is left must know, too.
    pub(super) fn note_that_it_runs_there(&mut self) {
        if let Some((place, record)) = self.followed.as_mut().filter(|(_, it)| !it.runs_there()) {
            *record = record.clone().running_there();
            // That it is not known is doubt, as before.
            if let Err(error) = place.write(record) {
                tracing::warn!(%error, "what was written down is not all that is known");
            }
        }
    }

    /// Leaves what was written down to another godwit.
    pub(super) fn leave_to_another(&mut self) {
        if let Some((place, _)) = &mut self.followed {
            place.abandon();
        }
    }

    /// Goes on with the session that was left.
    fn take_up_left(&mut self) -> Result<(), EngineError> {
        let path = self.options.follow_record.as_ref().ok_or(EngineError::Panicked("main"))?;
        let mut place = Place::of_left(path);
        let running = self.vm.was_running();
        let other_keys = |record: &Record| record.other_keys(&self.options.security);
        let found = Record::find(&mut place, running, (&self.ram, &[]), other_keys)?;
        let record = found.ok_or_else(|| place.refused("it is not there"))?;
        let (place, record) = self.followed.insert((place, record));
        place.write(record)?;
        self.session.restore(record)?;
        self.session.takes_over();
        // Who goes on may have the storage at another place by now.
        let safe = self.options.post_copy_safe.as_deref().or(record.safe());
        self.copied = safe.map(|directory| remainder::place(directory, record.id()));
        let (common, restarts) = (record.common(), record.restarts());
        self.agreed(common);
        (self.leaves, self.restarts) = (true, restarts);
        Ok(())
    }
}
