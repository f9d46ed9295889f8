//! Post-copy at a destination whose godwit was killed: another one fetches what is missing.

use super::fault::MadeUp;
use super::lanes::Lanes;
use super::left::Left;
use super::session::Session;
use super::{Destination, First, Notice, Options, PEER, Received};
use crate::address::Listener;
use crate::cells::Cells;
use crate::link::link_error;
use crate::vm::DestinationVm;
use crate::{Cancel, EngineError, Failure, Phase, Survivor, limits};

/// Fetches what is missing of the guest that runs in `vm`, for a godwit that was killed: over
/// `listener`, where the source knows it to be. `vm` was opened by what [`Left::machine`] says, and
/// its [`post_copy`](DestinationVm::post_copy) takes the pages up again that it is told of by
/// [`await_pages`](crate::vm::PostCopyDestination::await_pages); nothing else is asked of it, and
/// nothing is thrown away. The source is waited for without end; `cancel` is heeded until it has
/// come.
///
/// # Errors
/// Says what failed. Unless the guest was lost, what was `left` stays for another attempt.
///
/// ```
/// use godwit_engine::address::Listener;
/// use godwit_engine::destination::{Left, Options, follow};
/// use godwit_engine::vm::DestinationVm;
/// use godwit_engine::{Cancel, Failure};
///
/// fn go_on(left: Left, vm: &mut dyn DestinationVm, at: &Listener) -> Result<(), Failure> {
///     let (options, cancel) = (Options::default(), Cancel::default());
///     let received = follow(vm, at, left, &options, &cancel, &mut |it| println!("{it:?}"))?;
///     println!("it is whole: {:?}", received.fetched);
///     Ok(())
/// }
/// ```
pub fn follow(
    vm: &mut dyn DestinationVm,
    listener: &Listener,
    left: Left,
    options: &Options,
    cancel: &Cancel,
    notice: &mut dyn FnMut(&Notice),
) -> Result<Received, Failure> {
    let unheard = |cause| Failure { phase: Phase::Handover, survivor: Survivor::Unknown, cause };
    let opened = listener
        .address()
        .map_err(link_error(PEER))
        .and_then(|address| options.security.allows(&address))
        .and_then(|()| Cells::new(options.confined, PEER))
        .and_then(|cells| {
            let terms = (&options.security, &cells);
            let mut session = Session::restored(listener, terms, &left.written.record, cancel)?;
            session.takes_over();
            Ok(session)
        });
    let session = match opened {
        Ok(session) => session,
        Err(cause) => {
            left.abandon();
            return Err(unheard(cause));
        }
    };
    vm.heed(session.interrupt());
    let mut destination = Destination::new(vm, options, notice, session);
    match destination.take_up_left(&left) {
        Ok(lanes) => {
            // Who goes on may have the storage at another place by now.
            let safe = left.written.record.safe.clone();
            destination.safe = destination.safe.take().or(safe);
            destination.followed = Some(left);
            destination.run(First::Follow(Box::new(lanes)))
        }
        Err(cause) => {
            left.abandon();
            Err(unheard(cause))
        }
    }
}

impl Destination<'_> {
    /// Awaits again what was `left`; what will place it.
    fn take_up_left(&mut self, left: &Left) -> Result<Lanes, EngineError> {
        let record = &left.written.record;
        let missing = left.missing(&self.ram)?;
        let order = record.order(&self.ram).ok_or(EngineError::Panicked("main"))?;
        let wish = (false, record.features());
        let made_up = MadeUp::of(self.options);
        let lanes = Lanes::restored(&self.session, &self.ram, (order, wish), Vec::new(), made_up);
        let vm = self.vm.post_copy().ok_or(EngineError::Panicked("main"))?;
        let pages = vm.await_pages(missing).map_err(EngineError::Vm)?;
        self.begin_to_fetch(&lanes, pages)?;
        lanes.refuse_pages();
        (self.left, self.pages_complete, self.unheard) = (true, true, true);
        (self.runs, self.measures.running) = (record.running, record.running);
        (self.notice)(&Notice::Severed {
            why: EngineError::Killed.to_string(),
            limit: limits::ENDLESS,
        });
        self.tell_lacks();
        Ok(lanes)
    }
}
