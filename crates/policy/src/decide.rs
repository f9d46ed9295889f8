//! The decision after each round and within it: another round and how, switch over, or give up and
//! say why.
//!
//! The guest is stopped when the expected downtime is within the limit *and* one more round would
//! not bring it down by much: at a local minimum of what remains, not at the first moment that is
//! allowed. A guest that is slowed goes through another round only if the work that it loses by
//! that is not much more than what it is spared by standing still less.

use std::time::Duration;

use godwit_units::{ByteCount, PAGE_SIZE, PageCount, Rate};

use crate::govern::Governor;
use crate::guest::{Class, Guest, Link, time_to_finish};
use crate::hot::{Bounds, Hot};
use crate::observe::{Advice, Decision, Delayed, Estimate, Plan, RemainingTime, Round, Tick};
use crate::settings::{Settings, ThrottleMode};
use crate::share::Share;
use crate::throttle::{SEVERE, Throttle, View};
use crate::{Bandwidth, downtime};

mod shorten;

/// A round is worth making, once within the limit, if the last one brought the remaining data down
/// to this share.
const WORTHWHILE: f64 = 0.75;
/// Below this transfer time of the rest no further round is made: the fixed costs dominate.
const NEGLIGIBLE: Duration = Duration::from_micros(500);
/// Rounds made within the limit in search of the minimum, at the most.
const SEARCH_ROUNDS: u32 = 8;
/// An expected downtime counts as better when it is below this share of the best so far.
const PROGRESS: f64 = 0.95;
/// The share of the limit that plans aim at.
const AIM: f64 = 0.85;
/// The share of the limit that the last round before the switchover aims at.
const FINALE: f64 = 0.93;
/// Rounds are stuck when so many in a row brought no progress.
const STUCK: u32 = 3;
/// With the patience at its end this many times over, it ends whatever is in force.
const LAST_STRAW: u32 = 5;
/// Nor are more rounds made than this without progress, however short they are.
const MOST_ROUNDS: u32 = 1000;
/// A round's own bandwidth is believed within it after this.
const SETTLED: Duration = Duration::from_millis(500);
/// But not where it is below this share of the rounds before.
const STALLED: f64 = 0.2;

/// The convergence policy of one migration.
///
/// ```
/// use std::time::Duration;
///
/// use godwit_policy::{Decision, Policy, Round, Settings};
/// use godwit_units::{ByteCount, PageCount};
///
/// let mut policy = Policy::new(Settings::default());
/// policy.start(false);
/// // 100 MiB took a second; 1 MiB is left, which takes a hundredth of that.
/// let round = Round {
///     time: Duration::from_secs(1),
///     sent: ByteCount(100 << 20),
///     remaining: PageCount(256),
///     memory: PageCount(100_000),
///     ..Round::default()
/// };
/// let decision = loop {
///     match policy.round(&round) {
///         (Decision::NextRound(_), estimate) => {
///             assert_eq!(estimate.expected_downtime, Some(Duration::from_millis(10)));
///         }
///         (decision, _) => break decision,
///     }
/// };
/// assert_eq!(decision, Decision::SwitchOver);
/// ```
#[derive(Clone, Debug)]
pub struct Policy {
    settings: Settings,
    bandwidth: Bandwidth,
    guest: Guest,
    hot: Hot,
    share: Share,
    throttle: Throttle,
    governor: Governor,
    plan: Plan,
    rounds: u32,
    first_round: Duration,
    /// The sum of all rounds that have ended.
    clock: Duration,
    last_look: Duration,
    /// Pages found dirty since the round began.
    dirtied: f64,
    before: Vec<u32>,
    /// Bytes on the wire for a page.
    page_bytes: f64,
    fixed: Duration,
    gap: Duration,
    at_once: bool,
    lead: Duration,
    /// Disks move as well.
    disks: bool,
    previous: Option<PageCount>,
    searched: u32,
    /// The round under way is made only so that a guest that is slowed is stopped for less.
    shortening: bool,
    shortenings: u32,
    best: Option<Duration>,
    without_progress: Duration,
    stuck_rounds: u32,
    step: u32,
}

impl Policy {
    /// A policy that has seen nothing yet.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            bandwidth: Bandwidth::default(),
            guest: Guest::default(),
            hot: Hot::default(),
            share: Share::default(),
            throttle: Throttle::default(),
            governor: Governor::default(),
            plan: Plan::default(),
            rounds: 0,
            first_round: Duration::ZERO,
            clock: Duration::ZERO,
            last_look: Duration::ZERO,
            dirtied: 0.0,
            before: Vec::new(),
            page_bytes: PAGE_SIZE as f64,
            fixed: Duration::ZERO,
            gap: Duration::ZERO,
            at_once: false,
            lead: Duration::ZERO,
            disks: false,
            previous: None,
            searched: 0,
            shortening: false,
            shortenings: 0,
            best: None,
            without_progress: Duration::ZERO,
            stuck_rounds: 0,
            step: 0,
        }
    }

    /// What is to be in force in the first round; `disks` says whether disks move as well.
    pub fn start(&mut self, disks: bool) -> Plan {
        self.plan.memory_share =
            self.settings.memory_share.unwrap_or_else(|| Share::at_first(disks));
        self.plan.clone()
    }

    /// What holds now.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// What is in force, or should be.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Takes changed settings while the migration runs. The plan that follows is to be put into
    /// force at once.
    pub fn change(&mut self, settings: Settings) -> Plan {
        let before = std::mem::replace(&mut self.settings, settings);
        self.shortening = false;
        if before.throttle != self.settings.throttle {
            self.throttle = Throttle::default();
            self.governor = Governor::default();
            self.plan.throttle = 0.0;
            self.plan.dirty_rate_limit = None;
        }
        self.plan.throttle = self.plan.throttle.min(self.settings.max_throttle);
        if self.settings.delay_hot_percent == 0 {
            self.hot.forbid();
            self.plan.delayed = self.hot.delayed().clone();
        }
        if let Some(share) = self.settings.memory_share {
            self.plan.memory_share = share;
        }
        self.plan.clone()
    }

    /// The steps by which the downtime limit has grown: [`Settings::limit_after`].
    #[must_use]
    pub fn limit_steps(&self) -> u32 {
        self.step
    }

    /// Takes in what is seen within a round. Some, when another plan is to be put into force at
    /// once.
    pub fn tick(&mut self, tick: &Tick) -> Option<Plan> {
        let time = tick.in_round.saturating_sub(self.last_look);
        if time.is_zero() {
            return None;
        }
        self.look(tick.dirty, time, tick.throttle);
        self.last_look = tick.in_round;
        let before = self.plan.clone();
        self.govern_only_if(tick.can_govern);
        if self.rounds == 0 {
            self.hot.look(tick.dirty, self.guest.segment_pages(), self.settings.delay_hot_percent);
            self.plan.delayed = self.hot.delayed().clone();
        } else {
            let link = self.link_within(tick.in_round, tick.sent);
            let classes = self.guest.classes();
            let view = self.view(&classes, self.clock + tick.in_round, tick.remaining, link);
            let mut throttle = self.throttle.clone();
            // The governor's rate holds from harvest to harvest, and so for a whole round.
            if self.governor.budget().is_none() && !self.shortening {
                throttle.tick(self.settings.throttle, &view);
            }
            self.throttle = throttle;
            self.plan.throttle = self.throttle.value().min(self.settings.max_throttle);
            if self.may_end_round(tick) {
                self.plan.delayed = Delayed::new(0..tick.dirty.len());
            }
        }
        (self.plan != before).then(|| self.plan.clone())
    }

    /// The connections were lost, and stand again; `dirty` is what is to be found by the next look.
    /// A round that was cut off after `in_round` is followed by a new one. The time between is no
    /// part of either, and what the guest wrote in it says nothing of how fast it writes.
    pub fn taken_up(&mut self, in_round: Duration, dirty: &[u32]) {
        self.clock += in_round;
        if self.rounds == 0 {
            self.first_round += in_round;
        }
        self.guest.note(dirty);
        self.before = dirty.to_vec();
        (self.last_look, self.dirtied) = (Duration::ZERO, 0.0);
        self.shortening = false;
    }

    /// Takes in what was seen of a round and decides.
    pub fn round(&mut self, round: &Round) -> (Decision, Estimate) {
        self.shortening = false;
        self.guest.set_memory(round.memory.0);
        let looked = !self.last_look.is_zero();
        let disk = round.disk.unwrap_or_default();
        let busy = round.time.saturating_sub(round.idle);
        self.bandwidth.observe(round.sent + disk.sent, busy);
        if round.pages.0 >= 256 {
            self.page_bytes =
                (round.sent.0 as f64 / round.pages.0 as f64).clamp(16.0, 2.0 * PAGE_SIZE as f64);
        }
        if round.dirty.is_empty() {
            self.guest.look_at_all(round.remaining.0, round.time, round.throttle);
            self.dirtied = round.remaining.0 as f64;
        } else {
            self.look(round.dirty, round.time.saturating_sub(self.last_look), round.throttle);
        }
        self.clock += round.time;
        if self.rounds == 0 {
            self.first_round += round.time;
        }
        self.rounds += 1;
        self.last_look = Duration::ZERO;
        (self.fixed, self.lead) = (round.fixed, round.lead);
        (self.gap, self.at_once) = (round.gap, round.at_once);
        self.disks = round.disk.is_some();

        self.govern_only_if(round.can_govern);

        let bandwidth = self.bandwidth.average();
        let classes = self.guest.classes();
        let dirtied = std::mem::take(&mut self.dirtied);
        let dirty_rate = dirtied / round.time.as_secs_f64().max(1e-6);
        let left = self.left(&classes, round, looked);
        let disks = self.share.transfer(&disk, round.time, round.lead);
        let last = self.last_bandwidth(bandwidth);
        let expected =
            downtime::expected(left, last, round.fixed).and_then(|time| time.checked_add(disks?));
        let limit = self.limit();
        let previous = self.previous.replace(round.remaining);
        let previous = previous.map(|previous| previous.max(round.began_with));
        let mut estimate = Estimate {
            bandwidth,
            dirty_rate: Rate::from_bytes_per_second(dirty_rate * PAGE_SIZE as f64),
            expected_downtime: expected.and_then(|time| time.checked_add(round.verification)),
            limit,
            remaining_time: None,
            advice: None,
        };
        let fits = expected.is_some_and(|expected| expected <= limit);
        if fits {
            let transfer = expected.unwrap_or_default().saturating_sub(round.fixed);
            if self.is_slowed() {
                let shortened = self.shortened(&classes, round, dirty_rate, bandwidth);
                let Some((time, next)) = shortened else {
                    return (Decision::SwitchOver, estimate);
                };
                (self.shortening, self.shortenings) = (true, self.shortenings + 1);
                self.without_progress = Duration::ZERO;
                self.plan.delayed = Delayed::default();
                let low = time + round.fixed;
                let (mid, high) = (low + next, low + transfer.max(next));
                estimate.remaining_time = Some(RemainingTime { low, mid, high });
                return (Decision::NextRound(self.plan.clone()), estimate);
            }
            if self.is_minimum(round.remaining, previous, transfer) {
                return (Decision::SwitchOver, estimate);
            }
            self.without_progress = Duration::ZERO;
        } else {
            self.note_progress(expected, round.time);
        }
        let enough = self.enough(bandwidth);
        let bounds = Bounds {
            percent: self.settings.delay_hot_percent,
            rounds: self.settings.max_delay,
            until: round.memory.0 as f64 * f64::from(self.settings.delay_until_percent) / 100.0,
            enough,
            again: self.again(&classes, left, bandwidth, round.throttle),
        };
        if !round.dirty.is_empty() {
            self.hot.round(
                round.dirty,
                self.guest.segment_pages(),
                round.remaining.0 as f64,
                bounds,
            );
        }
        let (share, disk_limit) = match &round.disk {
            Some(disk) => {
                let enough = enough * self.page_bytes;
                self.share.round(disk, round.time.as_secs_f64(), enough, self.settings.disk_limit)
            }
            None => (crate::share::ALL, None),
        };
        let mut view = self.view(&classes, self.clock, round.remaining, bandwidth);
        (view.dirty_rate, view.dirtied) = (dirty_rate, dirtied);
        view.sent = round.sent.0 as f64 / self.page_bytes;
        // As long as memory waits for disks, nothing is gained by a slower guest.
        view.delaying |= share < crate::share::ALL;
        let (mut throttle, mut governor) = (self.throttle.clone(), self.governor.clone());
        let governs =
            matches!(self.settings.throttle, ThrottleMode::Adaptive | ThrottleMode::Governor);
        // A guest that is throttled already is not handed over: the end is near.
        let stuck = self.stuck_rounds >= STUCK;
        let needed =
            !fits && governs && throttle.value() <= 0.0 && throttle.is_needed(&view, stuck);
        governor.round(&view, round.can_govern && governs, needed);
        if governor.budget().is_some() {
            throttle.look_on(&view);
        } else if fits {
            throttle.rest(&view);
        } else {
            throttle.round(self.settings.throttle, &view, round.time);
        }
        let governed = governor.time_to_finish(&view);
        let estimated = match governed {
            Some(mid) => Some(RemainingTime { low: mid.mul_f64(0.8), mid, high: mid.mul_f64(1.5) }),
            None => self.remaining_time(&view, throttle.value(), bandwidth),
        };
        let spared = self.spared(&view, throttle.value());
        (self.throttle, self.governor) = (throttle, governor);
        estimate.remaining_time = estimated;
        if self.throttle.exhausted() {
            estimate.advice = Some(self.advice(&estimate, round.throttle));
        }
        if self.is_hopeless() {
            return (Decision::GiveUp(self.advice(&estimate, round.throttle)), estimate);
        }
        self.plan = Plan {
            throttle: self.throttle.value().min(self.settings.max_throttle),
            dirty_rate_limit: self.governor.budget(),
            delayed: spared.unwrap_or_else(|| self.hot.delayed().clone()),
            memory_share: self.settings.memory_share.unwrap_or(share),
            disk_limit,
        };
        (Decision::NextRound(self.plan.clone()), estimate)
    }

    /// Whether the guest is throttled or governed.
    fn is_slowed(&self) -> bool {
        self.plan.throttle > 0.0 || self.plan.dirty_rate_limit.is_some()
    }

    /// Where the machine offers no governor any more, none is in force, nor a round that was made
    /// of a guest that it held.
    fn govern_only_if(&mut self, can_govern: bool) {
        if !can_govern {
            self.governor.withdraw();
            self.shortening &= self.plan.dirty_rate_limit.take().is_none();
        }
    }

    /// Whether what remains, within a round, fits into the downtime already. Then a throttled guest
    /// is not kept waiting for the round's end: all that is left of it is passed by, and goes with
    /// the last one.
    fn may_end_round(&self, tick: &Tick) -> bool {
        let growth = self.growth(&self.guest.classes(), self.lead, tick.throttle);
        let bytes = (tick.remaining.0 as f64 + growth) * self.page_bytes;
        let last = self.last_bandwidth(self.bandwidth.average());
        let expected = downtime::expected(ByteCount(bytes as u64), last, self.fixed);
        self.is_slowed()
            && !self.shortening
            && !self.disks
            && !self.at_once
            && expected.is_some_and(|expected| expected <= self.limit().mul_f64(AIM))
    }

    /// Pages that a guest under `throttle` dirties anew in a time.
    fn growth(&self, classes: &[Class], time: Duration, throttle: f64) -> f64 {
        let most =
            self.plan.dirty_rate_limit.map_or(f64::INFINITY, |rate| rate * time.as_secs_f64());
        let time = time.as_secs_f64() * self.guest.speed(throttle);
        let free: f64 = classes
            .iter()
            .map(|c| (c.pages - c.dirty).max(0.0) * (1.0 - (-c.rate * time).exp()))
            .sum();
        free.min(most)
    }

    /// Pages that would be dirty after a round that sends all that is `left`.
    fn again(&self, classes: &[Class], left: ByteCount, bandwidth: Rate, throttle: f64) -> f64 {
        let time = bandwidth.time_for(left).unwrap_or_default().as_secs_f64();
        let time = time * self.guest.speed(throttle);
        classes.iter().map(|c| c.pages * (1.0 - (-c.rate * time).exp())).sum()
    }

    /// A look at segments, in the model and in the count of what was dirtied in this round.
    fn look(&mut self, dirty: &[u32], time: Duration, throttle: f64) {
        if self.plan.dirty_rate_limit.is_some() {
            self.guest.note(dirty);
        } else {
            self.guest.look(dirty, time, throttle);
        }
        self.before.resize(dirty.len(), 0);
        for (before, now) in self.before.iter_mut().zip(dirty) {
            let grown = if now >= before { now - *before } else { *now };
            self.dirtied += f64::from(grown);
            *before = *now;
        }
    }

    /// All of memory that stop-and-copy would have to send. Where nobody `looked` within the round,
    /// harvests have hidden from the looks how fast pages become dirty.
    fn left(&self, classes: &[Class], round: &Round, looked: bool) -> ByteCount {
        let mut growth = self.growth(classes, round.lead, round.throttle);
        if !looked {
            growth = growth.max(self.growth_at_most(round));
        }
        ByteCount(((round.remaining.0 as f64 + growth) * self.page_bytes) as u64)
    }

    /// Pages that become dirty until the guest stands still, at the pace of those that have become
    /// so since they were harvested: half of the time of sending ago, on average. As pages are
    /// written again, that pace only falls. Of segments that were left for later looks have seen
    /// the growth.
    fn growth_at_most(&self, round: &Round) -> f64 {
        let sending = round.time.saturating_sub(round.idle).as_secs_f64();
        let age = if round.at_once { round.time.as_secs_f64() } else { sending / 2.0 };
        let written = match round.dirty {
            [] => round.remaining.0 as f64,
            dirty => {
                let harvested =
                    dirty.iter().enumerate().filter(|(at, _)| !self.plan.delayed.contains(*at));
                harvested.map(|(_, pages)| f64::from(*pages)).sum()
            }
        };
        let lead = round.lead.as_secs_f64();
        let most = self.plan.dirty_rate_limit.map_or(f64::INFINITY, |rate| rate * lead);
        (written / age.max(1e-3) * lead).min(most)
    }

    fn limit(&self) -> Duration {
        self.settings.limit_after(self.step)
    }

    /// What the last round has of the link: what the operator says, or what was `measured`.
    fn last_bandwidth(&self, measured: Rate) -> Rate {
        self.settings.switchover_bandwidth.map_or(measured, |typed| typed.rate())
    }

    /// The pages that plans aim to have left at the end.
    fn enough(&self, measured: Rate) -> f64 {
        let time = self.limit().mul_f64(AIM).saturating_sub(self.fixed);
        self.last_bandwidth(measured).bytes_per_second() * time.as_secs_f64() / self.page_bytes
    }

    /// What the link carries, within a round: after a while the round itself tells more than the
    /// rounds before, unless it hardly sends at all, which is no matter of the link.
    fn link_within(&self, in_round: Duration, sent: ByteCount) -> Rate {
        let history = self.bandwidth.average();
        let now = sent.per(in_round.as_secs_f64());
        let stalled = now.bytes_per_second() < STALLED * history.bytes_per_second();
        if in_round >= SETTLED && !stalled { now } else { history }
    }

    /// What the modes decide from; what is counted by rounds is left at nothing.
    fn view<'a>(
        &'a self,
        classes: &'a [Class],
        clock: Duration,
        remaining: PageCount,
        bandwidth: Rate,
    ) -> View<'a> {
        let known: f64 = classes.iter().map(|class| class.dirty).sum();
        let used = clock.saturating_sub(self.first_round).as_secs_f64();
        let first = self.first_round.as_secs_f64();
        let (free, throttled) = match self.settings.finish_within {
            Some(time) => (time.as_secs_f64(), time.as_secs_f64()),
            // Not to be slowed is worth waiting for.
            None => ((4.0 * first).max(20.0), (2.0 * first).max(10.0)),
        };
        View {
            clock,
            remaining: remaining.0 as f64,
            bandwidth: bandwidth.bytes_per_second() / self.page_bytes,
            dirty_rate: 0.0,
            dirtied: 0.0,
            sent: 0.0,
            guest: &self.guest,
            classes,
            unsent: (remaining.0 as f64 - known).max(0.0),
            idle: self.gap.as_secs_f64(),
            at_once: self.at_once,
            lead: self.lead.as_secs_f64(),
            enough: self.enough(bandwidth),
            free_time: free - used,
            time_left: throttled - used,
            downtime: self.limit().as_secs_f64(),
            most: self.settings.max_throttle,
            delaying: !self.hot.delayed().is_empty(),
        }
    }

    /// Under a throttle that leaves the guest hardly anything: what the next round need not send.
    fn spared(&self, view: &View, throttle: f64) -> Option<Delayed> {
        if !matches!(self.settings.throttle, ThrottleMode::Adaptive | ThrottleMode::Vcpus)
            || throttle < SEVERE
            || view.delaying
            || view.at_once
        {
            return None;
        }
        let link = view.link();
        let enough = view.enough * FINALE / AIM;
        Some(Delayed::new(self.guest.spared(view.unsent, self.guest.speed(throttle), link, enough)))
    }

    fn is_minimum(
        &mut self,
        remaining: PageCount,
        previous: Option<PageCount>,
        transfer: Duration,
    ) -> bool {
        self.searched += 1;
        // Nothing to compare the first round with: it sent all of memory.
        let shrinks =
            previous.is_none_or(|previous| (remaining.0 as f64) < WORTHWHILE * previous.0 as f64);
        !(shrinks && transfer > NEGLIGIBLE && self.searched <= SEARCH_ROUNDS)
    }

    fn note_progress(&mut self, expected: Option<Duration>, time: Duration) {
        let expected = expected.unwrap_or(Duration::MAX).min(Duration::from_secs(1_000_000));
        if self.best.is_none_or(|best| expected < best.mul_f64(PROGRESS)) {
            self.best = Some(expected);
            self.without_progress = Duration::ZERO;
            self.stuck_rounds = 0;
        } else {
            self.without_progress += time;
            self.stuck_rounds += 1;
            if self.stuck_rounds >= 2 {
                self.step = (self.step + 1).min(Settings::STEPS);
            }
        }
    }

    /// Out of patience with all that helps in force.
    fn is_hopeless(&self) -> bool {
        let Some(patience) = self.settings.patience else { return false };
        let strongest = match self.settings.throttle {
            ThrottleMode::Off => true,
            ThrottleMode::Governor => self.governor.is_at_its_end(),
            _ => {
                self.governor.is_at_its_least()
                    || self.throttle.exhausted()
                    || self.throttle.value() >= self.settings.max_throttle.min(0.98) - 1e-9
            }
        };
        let strongest = strongest || self.share.is_spent(self.settings.disk_limit);
        let growing = self.settings.downtime_ceiling.is_some() && self.step < Settings::STEPS;
        let waiting = self.without_progress >= patience && self.stuck_rounds >= STUCK;
        let lowering = self.share.may_lower(self.settings.disk_limit);
        let long = self.without_progress >= patience * LAST_STRAW && self.stuck_rounds >= 12;
        waiting && (strongest && !growing && !lowering || long)
            || self.stuck_rounds >= MOST_ROUNDS
            || self.stuck_rounds >= 8 && self.fixed > self.limit() && !growing
    }

    fn advice(&self, estimate: &Estimate, throttle: f64) -> Advice {
        Advice {
            best: self.best.unwrap_or_default(),
            limit: estimate.limit,
            fixed: self.fixed,
            dirty_rate: estimate.dirty_rate,
            bandwidth: estimate.bandwidth,
            throttle: if self.throttle.exhausted() {
                self.settings.max_throttle
            } else {
                throttle.max(self.throttle.value())
            },
        }
    }

    fn remaining_time(&self, view: &View, throttle: f64, bandwidth: Rate) -> Option<RemainingTime> {
        let speed = self.guest.speed(throttle);
        let time = |faster: f64, busier: f64| {
            let link = Link { pages: view.bandwidth * faster, ..view.link() };
            let seconds = time_to_finish(
                view.classes,
                view.unsent,
                (speed * busier).min(1.0),
                link,
                view.enough,
            )?;
            let last = view.enough.min(view.remaining) / link.pages.max(1.0);
            Duration::try_from_secs_f64(seconds + last).ok()?.checked_add(self.fixed)
        };
        if bandwidth == Rate::ZERO {
            return None;
        }
        let mid = time(1.0, 1.0)?;
        let low = time(1.15, 0.8).unwrap_or(mid).min(mid);
        let high = time(0.85, 1.25).unwrap_or(mid * 3).max(mid);
        Some(RemainingTime { low, mid, high })
    }
}

#[cfg(test)]
mod tests;
