//! Carrying to the destination what comes for the guest's cards while it stands still.
//!
//! A packet that is lost costs a client its timer, for TCP 200 ms and more: many times the
//! downtime. Nobody is slowed down for the packets: the first of them are sent behind COMMIT, while
//! the destination runs the guest, the others when it runs, and what fails in it is lost as it
//! would have been.

use std::time::{Duration, Instant};

use godwit_wire::{Feature, Message, PACKET_LIMIT};

use super::Source;
use crate::limits;
use crate::vm::LatePackets;

/// A network that sends nothing more for this long has learned where the guest is: switches do so
/// by its first packet, with which it announces itself.
const QUIET: Duration = Duration::from_millis(10);
/// Of what there is already no more is carried at once, where other work waits: a destination that
/// is running the guest does not read it yet.
const BURST_BYTES: usize = 256 << 10;
const BURST_PACKETS: u64 = 128;
/// From the stop on. What is older was sent again, or is of no use any more; and a network that has
/// not learned by then is not waited for.
const LIMIT: Duration = Duration::from_secs(1);

impl Source<'_> {
    /// Finds the cards, while the guest runs.
    pub(super) fn find_cards(&mut self) {
        // To a guest that is paused nothing comes late.
        let wanted = self.common.features.contains(Feature::LatePackets) && self.vm.was_running();
        let late = self.vm.late_packets().filter(|_| wanted);
        self.has_cards = late.map(LatePackets::find).is_some();
    }

    /// The guest is about to be stopped.
    pub(super) fn keep_packets(&mut self) {
        self.packets_since = self.has_cards.then(Instant::now);
    }

    /// How long to wait for anything else, as what comes late is carried meanwhile.
    pub(super) fn late_tick(&self) -> Duration {
        if self.packets_since.is_some() { QUIET } else { limits::TICK }
    }

    /// With the guest given away: carries to the destination what has come for its cards since it
    /// was stopped.
    pub(super) fn carry_what_has_come(&mut self) {
        self.carry(Duration::ZERO, (limits::LATE_BURST, BURST_BYTES, BURST_PACKETS));
    }

    /// The same, and what comes until the network has learned where the guest is. Nothing is kept
    /// from then on.
    pub(super) fn carry_what_comes(&mut self) {
        self.carry(QUIET, (LIMIT, usize::MAX, limits::LATE_PACKETS));
        self.keep_no_packets();
    }

    fn carry(&mut self, wait: Duration, (time, most, count): (Duration, usize, u64)) {
        let Some(since) = self.packets_since else { return };
        let (began, mut bytes) = (Instant::now(), 0);
        let until = (self.meter.packets() + count).min(limits::LATE_PACKETS);
        while since.elapsed() < LIMIT {
            if began.elapsed() >= time || bytes >= most || self.meter.packets() >= until {
                return;
            }
            let packet = self.vm.late_packets().and_then(|late| late.next(wait));
            let Some(packet) = packet else { return };
            if packet.len() > PACKET_LIMIT {
                continue;
            }
            bytes += packet.len();
            if self.session.say(&Message::LatePacket(packet)).is_err() {
                // Part of it may be on its way, and what is said behind that would be taken for
                // the rest.
                self.session.cut();
                break;
            }
            self.meter.packet_carried();
        }
        self.keep_no_packets();
    }

    fn keep_no_packets(&mut self) {
        if self.packets_since.take().is_some()
            && let Some(late) = self.vm.late_packets()
        {
            late.end();
        }
    }
}
