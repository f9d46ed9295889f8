//! What a source offers, compared with what is here before anything is accepted.
//!
//! Invariant: nothing here is changed but that disks are opened, last of all and only those that
//! were allowed.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use godwit_disk::{Disk, DiskChoice, DiskSink, NotAllowed};
use godwit_memory::RamBlock;
use godwit_wire::{Feature, Message, Offer, QUESTIONS_LIMIT};

use super::disk::readers;
use super::layout;
use super::session::Session;
use super::{Notice, Options};
use crate::compression::Codecs;
use crate::remainder::Mark;
use crate::vm::{Ask, DestinationVm};
use crate::{EngineError, facts, limits};

/// An offer that fits.
pub(super) struct Accepted {
    pub(super) offer: Offer,
    /// The number here of each RAM block of the source.
    pub(super) order: Vec<usize>,
    pub(super) disks: Vec<(Disk, Box<dyn DiskSink>)>,
}

/// Compares the source's offer, which must fit, and opens the disks.
pub(super) fn consider(
    session: &Session<'_>,
    vm: &mut dyn DestinationVm,
    options: &Options,
    mut offer: Offer,
    notice: &mut dyn FnMut(&Notice),
) -> Result<Accepted, EngineError> {
    let Fitting { order, disks, awaits } = compare(session, vm, options, &offer)?;
    let sinks = open_disks(vm, &disks, &options.disks)?;
    if !awaits {
        leave_out_post_copy(&mut offer);
    }
    // Of who only asks, and never part of a session, whatever is offered.
    offer.features = offer.features.without(Feature::Facts);
    if offer.verify && !disks.is_empty() && readers(vm, disks.len())?.is_none() {
        offer.features = offer.features.without(Feature::DiskProof);
    }
    let ram = vm.ram().iter().map(|block| block.pages().bytes()).sum();
    notice(&Notice::Accepted {
        ram,
        disks: disks.clone(),
        protocol_version: session.version().number(),
        features: session.common_features(offer.features).to_string(),
    });
    Ok(Accepted { offer, order, disks: disks.into_iter().zip(sinks).collect() })
}

/// The answer to `offer`, which is accepted: what both sides have.
pub(super) fn accept(session: &Session<'_>, options: &Options, offer: &Offer) -> Message {
    let codecs = options.codecs.common(Codecs(offer.codecs)).0;
    Message::Accept { codecs, features: session.common_features(offer.features) }
}

/// Says whether `offer` would be accepted, which changes nothing, and ends the session.
///
/// # Errors
/// When nobody can be taken in here any more.
pub(super) fn answer_inquiry(
    mut session: Session<'_>,
    vm: &mut dyn DestinationVm,
    options: &Options,
    offer: &Offer,
    notice: &mut dyn FnMut(&Notice),
) -> Result<(), EngineError> {
    if session.common_features(offer.features).contains(Feature::Facts) {
        let _ = session.say(&Message::Facts(facts::of_this_host()));
        if offer.machine.is_empty() {
            return answer_nobody(session, vm, options, offer, notice);
        }
    }
    let compared = compare(&session, vm, options, offer);
    // Who asked may go as soon as it likes; what was begun for it is undone all the same.
    session.interrupt().silence();
    vm.inquired().map_err(EngineError::Uncertain)?;
    let mut offer = offer.clone();
    if compared.as_ref().is_ok_and(|fitting| !fitting.awaits) {
        leave_out_post_copy(&mut offer);
    }
    let offer = &offer;
    let answer = match &compared {
        Ok(_) => accept(&session, options, offer),
        Err(EngineError::Cancelled) => return Err(EngineError::Cancelled),
        Err(_) if vm.has_ended() => return Err(EngineError::Ended("destination")),
        Err(
            gone @ (EngineError::Link { .. }
            | EngineError::Silent { .. }
            | EngineError::Aborted { .. }
            | EngineError::Interrupted),
        ) => {
            notice(&Notice::Refused(gone.to_string()));
            return Ok(());
        }
        Err(cause) => Message::Abort { code: cause.abort_code(), text: cause.to_string() },
    };
    // Who has the answer may come back at once, to stay.
    session.close_door();
    let _ = session.say(&answer);
    let accepted = compared.is_ok();
    let refusal = compared.err().map(|cause| cause.to_string());
    notice(&Notice::Asked { peer: session.source().to_owned(), refusal });
    if accepted && session.common_features(offer.features).contains(Feature::Trial) {
        be_tried(&session, vm, notice);
    }
    // What the source says meanwhile is read: a reset would overtake the answer.
    session.end(true);
    Ok(())
}

/// Answers who asks without a VM: there is nothing to compare.
fn answer_nobody(
    mut session: Session<'_>,
    vm: &dyn DestinationVm,
    options: &Options,
    offer: &Offer,
    notice: &mut dyn FnMut(&Notice),
) -> Result<(), EngineError> {
    session.interrupt().silence();
    session.close_door();
    let _ = session.say(&accept(&session, options, offer));
    notice(&Notice::Looked { peer: session.source().to_owned() });
    if session.common_features(offer.features).contains(Feature::Trial) {
        be_tried(&session, vm, notice);
    }
    session.end(true);
    Ok(())
}

/// Answers a source that tries what the connection carries, until it has gone or time is over.
fn be_tried(session: &Session<'_>, vm: &dyn DestinationVm, notice: &mut dyn FnMut(&Notice)) {
    let until = Instant::now() + limits::TRIAL;
    let mut bytes = 0;
    while let Ok(Some(Message::Trial(filling))) = session.words_until(vm, until, notice) {
        bytes += filling.len() as u64;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let clock = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
        if session.say(&Message::Tried { bytes, clock }).is_err() {
            return;
        }
    }
}

/// What fits of an offer.
struct Fitting {
    /// The number here of each RAM block of the source.
    order: Vec<usize>,
    disks: Vec<Disk>,
    /// Whether the guest can run here before all of its pages have come, if that was offered.
    awaits: bool,
}

/// Compares an offer with what is here. What the source is asked to compare comes last: until then
/// it looks at its own machine.
fn compare(
    session: &Session<'_>,
    vm: &mut dyn DestinationVm,
    options: &Options,
    offer: &Offer,
) -> Result<Fitting, EngineError> {
    let names = offer.blocks.iter().map(|block| block.name.as_str()).collect();
    let mut asked = 0;
    asking(session, &mut asked, |ask| vm.offered(&names, ask))?.map_err(EngineError::Vm)?;
    let ram = vm.ram();
    let order = layout::fit(offer, vm.machine(), &ram).map_err(EngineError::Layout)?;
    check_room(&ram, vm, options.overcommit)?;
    let common = session.common_features(offer.features);
    let wanted = offer.features.contains(Feature::PostCopyWanted);
    let safe = common.contains(Feature::PostCopySafe);
    let offered = offer.features.contains(Feature::PostCopy);
    let refusal = if offered { cannot_await(vm, options) } else { None };
    match &refusal {
        _ if !common.contains(Feature::PostCopy) => {}
        Some(why) if wanted => {
            let words =
                format!("the guest cannot run here before all of its pages have come: {why}");
            return Err(EngineError::Layout(words));
        }
        None if safe => find_safe_place(session, options).map_err(EngineError::Layout)?,
        _ => {}
    }
    let disks = layout::disks(offer).map_err(EngineError::Layout)?;
    if let (true, Some(disk)) = (options.disks.is_none(), disks.first()) {
        // The adapter, which knows all names of a disk, need not be asked.
        return Err(EngineError::Layout(NotAllowed(disk.name.clone()).to_string()));
    }
    asking(session, &mut asked, |ask| vm.compare(ask))?
        .map_err(|error| EngineError::Layout(error.to_string()))?;
    Ok(Fitting { order, disks, awaits: refusal.is_none() })
}

/// Why the guest of `vm` cannot run before all of its pages have come, if it cannot.
fn cannot_await(vm: &mut dyn DestinationVm, options: &Options) -> Option<String> {
    if options.reconnect.is_zero() {
        let words = "connections that are lost meanwhile must be made again; leave out \
                     --reconnect 0s here, too";
        return Some(words.to_owned());
    }
    if options.dump.is_some() {
        return Some("its memory is dumped before it runs; leave out --dump here".to_owned());
    }
    match vm.post_copy() {
        Some(vm) => vm.cannot_await(),
        None => Some("this kind of machine has no post-copy".to_owned()),
    }
}

/// Makes sure that the copy which the source makes of what is missing would be found here.
fn find_safe_place(session: &Session<'_>, options: &Options) -> Result<(), String> {
    let found = match &options.post_copy_safe {
        Some(directory) => Mark::find(directory, session.id()),
        None => Err("it was not said where; give --postcopy-safe to receive as well".to_owned()),
    };
    found.map_err(|why| format!("the copy in a third place would not be found here: {why}"))
}

/// What cannot be done here is left out of what the session has.
fn leave_out_post_copy(offer: &mut Offer) {
    offer.features = offer.features.without(Feature::PostCopy).without(Feature::PostCopySafe);
}

/// Whether all memory that the guest may come to use has room here.
pub(super) fn check_room(
    ram: &[RamBlock],
    vm: &dyn DestinationVm,
    overcommit: bool,
) -> Result<(), EngineError> {
    godwit_memory::mounts_hold(ram)?;
    if !overcommit {
        godwit_memory::host_holds(ram, vm.pid())?;
    }
    Ok(())
}

/// Has the adapter do what it needs the source's answers for; whatever it asks goes to the source's
/// adapter. `asked` counts the questions of this offer.
fn asking<T>(
    session: &Session<'_>,
    asked: &mut usize,
    work: impl FnOnce(&mut Ask<'_>) -> T,
) -> Result<T, EngineError> {
    let mut broken = None;
    let done = work(&mut |question| {
        *asked += 1;
        let answered = if *asked <= QUESTIONS_LIMIT {
            session.ask(question)
        } else {
            Err(EngineError::Panicked("main"))
        };
        answered.map_err(|error| {
            let words = error.to_string();
            broken = Some(error);
            words.into()
        })
    });
    // A link that broke is that, whatever the adapter makes of it.
    broken.map_or(Ok(done), Err)
}

/// Opens `disks` for writing, as far as `allowed` has them.
pub(super) fn open_disks(
    vm: &mut dyn DestinationVm,
    disks: &[Disk],
    allowed: &DiskChoice,
) -> Result<Vec<Box<dyn DiskSink>>, EngineError> {
    let sinks = match (vm.disk_destination(), disks.first()) {
        (_, None) => Ok(Vec::new()),
        (Some(vm), _) => vm.open_disks(disks, allowed).map_err(|error| error.to_string()),
        (None, Some(disk)) => {
            Err(format!("disk '{}' cannot be received by this kind of machine", disk.name))
        }
    };
    let sinks = sinks.map_err(EngineError::Layout)?;
    if sinks.len() == disks.len() { Ok(sinks) } else { Err(EngineError::Panicked("main")) }
}
