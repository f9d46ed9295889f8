//! All that is measured of a migration, advanced from phase to phase: rounds, the link, the parts
//! of the downtime.
//!
//! Invariant: each part of the downtime begins where the part before it ended, so that they add up.

use std::time::{Duration, Instant};

use godwit_memory::RamBlock;
use godwit_track::GovernorMeasures;
use godwit_units::ByteCount;
use godwit_wire::Version;

use super::common::Common;
use super::speed::Losses;
use crate::limits;
use crate::report::{
    Audit, DiskMeasures, DowntimeParts, Measures, PostCopyMeasures, RoundMeasures,
};

/// In the first moments of the first round looks come more often: what is hot is best left before
/// it is sent.
const EARLY: Duration = Duration::from_millis(300);
const EARLY_TICK: Duration = Duration::from_millis(20);

/// A part of the downtime.
#[derive(Clone, Copy, Debug)]
pub(super) enum Part {
    Drain,
    Copy,
    Verify,
    Safe,
    Save,
    Load,
    Handover,
}

/// Rounds whose pages are told apart by where they are.
const MAPPED_ROUNDS: usize = 64;

/// What the others have counted when the migration is over.
pub(super) struct Totals {
    /// Bytes on the wire for pages.
    pub(super) sent: ByteCount,
    /// Memory that the fingerprints take.
    pub(super) fingerprints: ByteCount,
    pub(super) disks: Vec<DiskMeasures>,
    pub(super) losses: Losses,
    pub(super) governor: GovernorMeasures,
}

pub(super) struct Meter {
    started: Instant,
    measures: Measures,
    /// Since when writes are tracked, if they are.
    tracked_from: Option<Instant>,
    round_began: Instant,
    /// When the round before was acknowledged.
    round_ended: Option<Instant>,
    /// Time between that and the beginning of this one.
    gap: Duration,
    /// Time at the beginning of the round in which nothing was sent.
    waited: Duration,
    /// Bytes on the wire when the round began.
    sent_before: ByteCount,
    /// The last flush of disks at the destination.
    flush: Duration,
    /// To the destination and back, once it was seen.
    round_trip: Option<Duration>,
    stopped: Option<Instant>,
    /// When the current part of the downtime began.
    mark: Instant,
}

impl Meter {
    /// A migration over so many channels of memory begins.
    pub(super) fn begin(channels: u8) -> Self {
        let now = Instant::now();
        Self {
            started: now,
            measures: Measures { channels: channels.into(), ..Measures::default() },
            tracked_from: None,
            round_began: now,
            round_ended: None,
            gap: Duration::ZERO,
            waited: Duration::ZERO,
            sent_before: ByteCount::ZERO,
            flush: Duration::ZERO,
            round_trip: None,
            stopped: None,
            mark: now,
        }
    }

    /// Since the migration began.
    pub(super) fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// The connections were lost within a round, of which so much was done.
    pub(super) fn severed(&mut self, mut round: RoundMeasures, map: Vec<u32>) {
        (round.time, round.cut_off) = (self.round_began.elapsed(), true);
        self.keep(round, map);
    }

    /// It goes over so many channels of memory.
    pub(super) fn goes_over(&mut self, channels: u8) {
        self.measures.channels = channels.into();
    }

    /// They stand again, with so many channels of memory, after having been lost for `time`; so
    /// much that had been sent was lost with them. What comes next is a round behind none.
    pub(super) fn resumed(&mut self, time: Duration, sent_again: ByteCount, channels: usize) {
        self.round_ended = None;
        self.measures.channels = channels;
        self.measures.resumptions += 1;
        self.measures.severed += time;
        self.measures.sent_again += sent_again;
    }

    /// The destination has accepted, and speaks `version`.
    pub(super) fn accepted(&mut self, version: Version, common: &Common) {
        self.measures.protocol_version = version.number();
        self.measures.features = common.features.to_string();
        self.measures.codecs = common.codecs.to_string();
    }

    /// The set-up is over. From here on writes are tracked, for which a part of the machine was
    /// stopped for so long; `None`: they are not.
    pub(super) fn set_up(&mut self, ram: &[RamBlock], tracking: Option<Duration>) {
        let now = Instant::now();
        self.tracked_from = tracking.map(|_| now);
        self.measures.tracking_stop = tracking.unwrap_or_default();
        self.measures.ram = ram.iter().map(|block| block.pages().bytes()).sum();
        self.measures.setup = now - self.started;
    }

    /// A round begins, with so many bytes on the wire. What lies between the rounds belongs to it.
    pub(super) fn begin_round(&mut self, sent: ByteCount) {
        self.round_began = Instant::now();
        self.gap = self.round_ended.map_or(Duration::ZERO, |ended| ended.elapsed());
        self.sent_before = sent;
    }

    /// Channels of memory are about to be told to send.
    pub(super) fn begin_sending(&mut self) {
        self.waited = self.round_began.elapsed();
    }

    /// The destination has answered something after so long. The least that was seen counts: it may
    /// have had pages to place first, and the link bytes to carry that were on their way.
    pub(super) fn answered(&mut self, round_trip: Duration) {
        self.round_trip = Some(self.round_trip.map_or(round_trip, |least| least.min(round_trip)));
    }

    /// It has acknowledged a round after so long, and has flushed disks for `flush`.
    pub(super) fn acknowledged(&mut self, round_trip: Duration, flush: Duration) {
        self.answered(round_trip);
        if !flush.is_zero() {
            self.flush = flush;
        }
    }

    /// The round is over; how long it took.
    pub(super) fn end_round(&mut self) -> Duration {
        self.round_ended = Some(Instant::now());
        self.round_began.elapsed()
    }

    /// Keeps what was measured of a round, and how many pages of which part of memory were sent.
    pub(super) fn keep(&mut self, round: RoundMeasures, map: Vec<u32>) {
        self.measures.round_list.push(round);
        match self.measures.memory_map.last_mut() {
            Some(last) if self.measures.round_list.len() > MAPPED_ROUNDS => {
                last.iter_mut().zip(map).for_each(|(sum, pages)| *sum = sum.saturating_add(pages));
            }
            _ => self.measures.memory_map.push(map),
        }
    }

    /// The number of the last round that was kept.
    pub(super) fn last_round(&self) -> u32 {
        self.measures.round_list.last().map_or(0, |round| round.round)
    }

    /// How long the round has taken so far, with what lay before it.
    pub(super) fn in_round(&self) -> Duration {
        self.gap + self.round_began.elapsed()
    }

    /// What was sent in it, with so many bytes on the wire by now.
    pub(super) fn sent_in_round(&self, sent: ByteCount) -> ByteCount {
        sent - self.sent_before
    }

    /// Time between the round before and this one.
    pub(super) fn gap(&self) -> Duration {
        self.gap
    }

    /// Time in this round, and between it and the one before, in which nothing was sent.
    pub(super) fn idle(&self) -> Duration {
        self.waited + self.gap
    }

    /// How often to look while the round runs.
    pub(super) fn tick(&self) -> Duration {
        let early = self.measures.round_list.is_empty() && self.round_began.elapsed() < EARLY;
        if early { EARLY_TICK } else { limits::TICK }
    }

    /// The last flush of disks at the destination.
    pub(super) fn flush(&self) -> Duration {
        self.flush
    }

    /// To the destination and back, as far as known.
    pub(super) fn round_trip(&self) -> Duration {
        self.round_trip.unwrap_or_default()
    }

    /// The guest stopped at `at`, and its devices are drained.
    pub(super) fn guest_stopped(&mut self, at: Instant) {
        (self.stopped, self.mark) = (Some(at), at);
        self.measures.tracked =
            self.tracked_from.map_or(Duration::ZERO, |from| at.saturating_duration_since(from));
        // Those of a stop behind which it ran on at the source say nothing.
        self.measures.parts = DowntimeParts::default();
        self.part_ended(Part::Drain);
    }

    /// A part of the downtime has ended, and the next begins.
    pub(super) fn part_ended(&mut self, part: Part) {
        let now = Instant::now();
        let time = now.saturating_duration_since(std::mem::replace(&mut self.mark, now));
        let parts = &mut self.measures.parts;
        *match part {
            Part::Drain => &mut parts.drain,
            Part::Copy => &mut parts.copy,
            Part::Verify => &mut parts.verify,
            Part::Safe => &mut parts.safe,
            Part::Save => &mut parts.save,
            Part::Load => &mut parts.load,
            Part::Handover => &mut parts.handover,
        } += time;
    }

    /// The audit has found nothing wrong.
    pub(super) fn audited(&mut self, audit: Audit) {
        self.measures.audit = Some(audit);
    }

    /// The digests of both sides were equal.
    pub(super) fn verified(&mut self) {
        self.measures.verified = true;
    }

    /// All memory of the source was compared with what was sent, which took so long.
    pub(super) fn looked_back(&mut self, time: Duration) {
        self.measures.look_back = Some(time);
    }

    /// A packet that came late was sent on.
    pub(super) fn packet_carried(&mut self) {
        self.measures.late_packets += 1;
    }

    /// How many were.
    pub(super) fn packets(&self) -> u64 {
        self.measures.late_packets
    }

    /// The device state had so many bytes.
    pub(super) fn state_passed(&mut self, bytes: ByteCount) {
        self.measures.device_state = bytes;
    }

    /// The guest runs at the destination.
    pub(super) fn finish(&mut self, totals: Totals) {
        let Totals { sent, fingerprints, disks, losses, governor } = totals;
        let now = Instant::now();
        let measures = &mut self.measures;
        let rounds = &measures.round_list;
        measures.total = now - self.started;
        measures.downtime =
            self.stopped.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        measures.rounds = rounds.len();
        measures.raw = rounds.iter().map(|round| round.raw).sum();
        measures.unchanged = rounds.iter().map(|round| round.unchanged).sum();
        measures.hinted = rounds.iter().map(|round| round.hinted).sum();
        measures.fingerprints = fingerprints;
        measures.disks = disks;
        measures.throttled = losses.throttled;
        measures.lost = losses.lost;
        measures.under_half = losses.under_half;
        measures.under_tenth = losses.under_tenth;
        measures.write_faults_delayed = governor.delayed;
        measures.vcpus_waited = governor.waited;
        measures.longest_wait = governor.longest_wait;
        measures.sent = sent + measures.device_state;
    }

    /// What followed when the guest ran at the destination already is in place; so many bytes were
    /// on the wire in all.
    pub(super) fn served(&mut self, post_copy: PostCopyMeasures, sent: ByteCount) {
        self.measures.sent = sent + self.measures.device_state;
        self.measures.total = self.started.elapsed();
        self.measures.resumptions += post_copy.resumptions;
        self.measures.severed += post_copy.severed;
        self.measures.post_copy = Some(post_copy);
    }

    /// All that was measured.
    pub(super) fn into_measures(self) -> Measures {
        self.measures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_the_downtime_add_up() {
        let mut meter = Meter::begin(2);
        meter.set_up(&[], Some(Duration::ZERO));
        // The vCPUs stopped a while ago: what passed since is the first part.
        let stopped = Instant::now() - Duration::from_millis(30);
        meter.guest_stopped(stopped);
        // What is saved while the copy is made counts before it and behind it.
        let saved = [Part::Save, Part::Safe, Part::Save];
        let all = [&[Part::Copy, Part::Verify][..], &saved, &[Part::Load, Part::Handover]];
        for part in all.concat() {
            std::thread::sleep(Duration::from_millis(2));
            meter.part_ended(part);
        }
        let parts = meter.measures.parts;
        let DowntimeParts { drain, copy, verify, safe, save, load, handover } = parts;
        let all = [drain, copy, verify, safe, save, load, handover];
        assert!(parts.drain >= Duration::from_millis(30), "{parts:?}");
        assert!(all[1..].iter().all(|part| *part >= Duration::from_millis(2)), "{parts:?}");
        assert_eq!(all.iter().sum::<Duration>(), meter.mark - stopped);
    }

    #[test]
    fn what_lies_between_rounds_belongs_to_the_one_that_comes() {
        let mut meter = Meter::begin(1);
        meter.begin_round(ByteCount(100));
        assert_eq!(meter.gap(), Duration::ZERO);
        assert_eq!(meter.sent_in_round(ByteCount(130)), ByteCount(30));
        meter.end_round();
        std::thread::sleep(Duration::from_millis(5));
        meter.begin_round(ByteCount(130));
        meter.begin_sending();
        assert!(meter.gap() >= Duration::from_millis(5) && meter.idle() >= meter.gap());
        assert!(meter.in_round() >= meter.gap());
        // The least round trip counts, and the last flush.
        meter.answered(Duration::from_millis(8));
        meter.acknowledged(Duration::from_millis(10), Duration::ZERO);
        assert_eq!(meter.round_trip(), Duration::from_millis(8), "the link was full");
        meter.acknowledged(Duration::from_millis(7), Duration::from_millis(3));
        meter.acknowledged(Duration::from_millis(9), Duration::ZERO);
        assert_eq!(meter.round_trip(), Duration::from_millis(7));
        assert_eq!(meter.flush(), Duration::from_millis(3));
    }
}
