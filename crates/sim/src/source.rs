//! What the source's engine does, in virtual time: copies rounds, asks the policy, puts its plans
//! into force.

use std::time::Duration;

use godwit_policy::{
    Decision, Delayed, DiskStatistics, Estimate, Plan, Policy, Round, ThrottleMode, Tick,
};
use godwit_units::{ByteCount, PageCount};

use crate::disk::Disk;
use crate::memory::Memory;
use crate::outcome::{Followed, Outcome, Point, RoundRow};
use crate::scenario::{Moment, Scenario, Synchronisation, Trouble, Vcpus};
use crate::{guest, link};

/// A link that broke is noticed after this many seconds.
const NOTICE: f64 = 1.0;
/// Looks within a round, at the most.
const LOOKS: f64 = 100.0;

/// A step takes at least this part of what is still missing: some thousands of steps in all, where
/// the link stays as it is.
const STEPS: f64 = 1000.0;

/// How often the conversation changes its direction while the guest is stopped, and a little for
/// luck.
const TURNS: u32 = 6;

/// Pages on their way at any time, as a share of what the link carries in a second.
const WINDOW: f64 = 0.05;

/// Something went wrong while a round was copied.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Broken;

#[derive(Debug)]
pub(crate) struct Source<'a> {
    scenario: &'a Scenario,
    memory: Memory,
    disk: Option<Disk>,
    policy: Policy,
    plan: Plan,
    pub(crate) now: f64,
    stopped: Option<f64>,
    /// The guest has left before its memory, and runs at this speed there.
    left: Option<f64>,
    /// Some of it is still to follow.
    follows: bool,
    row: RoundRow,
    /// A pass over memory is in progress and goes on in the next round.
    midway: bool,
    /// Time without sending that belongs to the round: before it, and in it.
    gap: f64,
    /// Whether both machines were ready in the last round.
    was_prepared: bool,
    idle: f64,
    /// A round is left at this time: something goes wrong then.
    pub(crate) until: Option<f64>,
    pub(crate) outcome: Outcome,
}

impl<'a> Source<'a> {
    pub(crate) fn new(scenario: &'a Scenario) -> Self {
        let at_once = matches!(scenario.synchronisation, Synchronisation::AtOnce(_));
        let mut policy = Policy::new(scenario.settings);
        let plan = policy.start(scenario.disk.is_some());
        Self {
            memory: Memory::new(&scenario.guest, at_once),
            disk: scenario.disk.map(Disk::new),
            policy,
            plan,
            now: 0.0,
            stopped: None,
            left: None,
            follows: false,
            row: RoundRow::default(),
            midway: false,
            gap: 0.0,
            was_prepared: false,
            idle: 0.0,
            until: None,
            scenario,
            outcome: Outcome::new(),
        }
    }

    fn speed(&self) -> f64 {
        if self.stopped.is_some() {
            return 0.0;
        }
        if let Some(speed) = self.left {
            return speed;
        }
        match self.plan.dirty_rate_limit.filter(|_| self.scenario.vcpus != Vcpus::Deaf) {
            Some(dirty_rate_limit) => {
                let factor = guest::factor(&self.scenario.guest.phases, self.now);
                self.memory.governed_speed(dirty_rate_limit, factor)
            }
            None => self.scenario.vcpus.speed(self.plan.throttle),
        }
    }

    fn can_govern(&self) -> bool {
        self.scenario.governor || self.scenario.settings.throttle == ThrottleMode::Governor
    }

    /// Time passes; the guest's losses are counted.
    fn account(&mut self, time: f64) {
        let speed = self.speed();
        self.now += time;
        self.row.speed += speed * time;
        self.outcome.lost_work += (1.0 - speed) * time;
        if let (Some(followed), None, true) =
            (&mut self.outcome.post_copy, self.stopped, self.follows)
        {
            followed.seconds += time;
            followed.lost_work += (1.0 - speed) * time;
        }
        if speed < 0.1 {
            self.outcome.under_10 += time;
        }
        if speed < 0.5 {
            self.outcome.under_50 += time;
        }
    }

    /// The guest runs on while nothing is sent.
    pub(crate) fn wait(&mut self, time: f64) {
        if self.left.is_some() {
            return self.wait_alone(time);
        }
        let factor = guest::factor(&self.scenario.guest.phases, self.now);
        let speed = self.speed();
        self.memory.advance(time, speed, factor);
        if let Some(disk) = &mut self.disk {
            disk.advance(time, speed, self.plan.disk_limit.map(|rate| rate.bytes_per_second()));
        }
        self.account(time);
    }

    /// A guest that has left runs on until it needs what is missing.
    fn wait_alone(&mut self, time: f64) {
        let factor = guest::factor(&self.scenario.guest.phases, self.now);
        let misses = self.memory.misses(factor);
        let runs = match misses {
            _ if self.stopped.is_some() => 0.0,
            misses if misses > 0.0 => time.min(1.0 / misses),
            _ => time,
        };
        for (time, speed) in [(runs, 1.0), (time - runs, 0.0)] {
            self.left = Some(speed);
            self.account(time);
        }
        self.left = Some(1.0);
    }

    /// Ends the last round without what is left, which the destination is told.
    pub(crate) fn list_missing(&mut self, round: u32) {
        let (Synchronisation::AtOnce(time) | Synchronisation::Pieces(time)) =
            self.scenario.synchronisation;
        self.row = RoundRow { round, start: self.now, ..RoundRow::default() };
        self.account(time.as_secs_f64());
        let missing = self.memory.leave() * 4096.0;
        self.end_row(round);
        if let Some(row) = self.outcome.rounds.last_mut() {
            row.remaining = missing;
        }
        self.outcome.post_copy = Some(Followed { missing, ..Followed::default() });
        (self.left, self.follows, self.outcome.reason) = (Some(1.0), true, None);
    }

    /// Whether the guest has left before its memory.
    pub(crate) fn has_left(&self) -> bool {
        self.left.is_some()
    }

    /// It stays after all.
    pub(crate) fn stays(&mut self) {
        (self.left, self.follows, self.outcome.post_copy) = (None, false, None);
    }

    /// Sends what is missing, until none is; `cut` says that the link has been cut already.
    pub(crate) fn serve(&mut self, cut: bool) -> Result<(), Broken> {
        let wait = self.scenario.fault + self.scenario.link.latency * 2;
        let tick = self.scenario.tick.as_secs_f64() / 10.0;
        while self.memory.missing() >= 0.5 && self.now <= self.scenario.longest.as_secs_f64() {
            let due = self.until.is_some_and(|until| self.now >= until);
            if due || self.is_cut() && !cut {
                return Err(Broken);
            }
            let until = self.until.map_or(f64::INFINITY, |until| until - self.now);
            let rate = self.capacity();
            let stalled = self.stalled().or((rate <= 0.0).then_some(tick));
            if let Some(stalled) = stalled {
                self.wait_alone(stalled.min(until));
                self.point();
                continue;
            }
            let factor = guest::factor(&self.scenario.guest.phases, self.now);
            // Many small steps, but not without bound, and none beyond what changes the link.
            let most = tick.max(self.memory.missing() / rate / STEPS);
            let most = most.min(until).min(self.unchanged());
            let step = self.memory.follow(rate, most, factor, wait.as_secs_f64());
            self.left = Some(step.speed);
            self.account(step.used);
            let sent = step.sent * self.scenario.link.page_bytes;
            self.outcome.sent += sent;
            if let Some(followed) = &mut self.outcome.post_copy {
                followed.faults += step.faults;
            }
            self.point();
        }
        (self.left, self.follows) = (Some(1.0), self.memory.missing() >= 0.5);
        Ok(())
    }

    /// Nothing more follows the guest.
    pub(crate) fn end(&mut self) {
        if self.left.is_some() {
            self.outcome.lacking = self.memory.missing();
        }
    }

    /// Nothing is copied in a round of a guest that leaves at once.
    pub(crate) fn skip_round(&mut self, round: u32) {
        self.row = RoundRow { start: self.now, ..RoundRow::default() };
        self.memory.begin();
        self.end_row(round);
    }

    /// Pages that the link carries each second, if it carries any.
    fn capacity(&self) -> f64 {
        link::pages(&self.scenario.link, self.scenario.seed, self.now)
    }

    fn link(&self) -> f64 {
        if self.stalled().is_some() { 0.0 } else { self.capacity() }
    }

    /// For how many seconds the link stays as it is, but for what happens to its ends.
    fn unchanged(&self) -> f64 {
        let stalls = self.scenario.incidents.iter().filter_map(|incident| {
            match (incident.moment, incident.trouble) {
                (Moment::At(at), Trouble::Stall(_)) => Some(at.as_secs_f64()),
                _ => None,
            }
        });
        let cut = self.scenario.cut.and_then(|cut| cut.at).map(|at| at.as_secs_f64());
        let next = stalls.chain(cut).filter(|at| *at > self.now).fold(f64::INFINITY, f64::min);
        (next - self.now).min(link::steady(&self.scenario.link, self.now)).max(1e-6)
    }

    /// For how many seconds more nothing passes the link, though it stands.
    fn stalled(&self) -> Option<f64> {
        let left = self.scenario.incidents.iter().filter_map(|incident| {
            let (Moment::At(at), Trouble::Stall(time)) = (incident.moment, incident.trouble) else {
                return None;
            };
            let stall = at.as_secs_f64()..(at + time).as_secs_f64();
            stall.contains(&self.now).then_some(stall.end - self.now)
        });
        left.reduce(f64::max)
    }

    /// Pages on their way.
    fn window(&self) -> f64 {
        self.capacity() * (WINDOW + self.scenario.link.latency.as_secs_f64())
    }

    /// The link broke: some of what was on its way has not arrived.
    pub(crate) fn lose(&mut self) {
        self.memory.lose(0.5 * self.window());
    }

    /// The connections are lost: the guest runs free, and what was on its way is sent again.
    pub(crate) fn sever(&mut self) {
        self.plan = Plan { throttle: 0.0, dirty_rate_limit: None, ..self.plan.clone() };
        let window = self.window();
        self.memory.take_back(window);
        if let Some(disk) = &mut self.disk {
            disk.take_back(window * self.scenario.link.page_bytes);
        }
        self.midway = false;
        self.gap = 0.0;
    }

    /// The destination has all that was sent.
    pub(crate) fn placed(&mut self) {
        self.memory.placed();
        if let Some(disk) = &mut self.disk {
            disk.placed();
        }
    }

    /// The guest is given away: what of it is not there.
    pub(crate) fn give_away(&mut self) {
        // It is given away once more where the answer was lost, and may run there by then.
        if self.stopped.is_some() && self.left.is_none() {
            self.outcome.lacking = self.memory.remaining() + self.memory.missing();
        }
    }

    fn is_cut(&self) -> bool {
        let at = self.scenario.cut.and_then(|cut| cut.at);
        at.is_some_and(|at| self.now >= at.as_secs_f64())
    }

    /// Copies a round; the last one with the guest stopped.
    pub(crate) fn copy_round(&mut self, round: u32, last: bool) -> Result<(), Broken> {
        self.row = RoundRow {
            round,
            start: self.now,
            throttle: self.plan.throttle,
            memory_share: self.plan.memory_share,
            ..RoundRow::default()
        };
        if last {
            self.plan =
                Plan { delayed: Delayed::default(), memory_share: 1024, ..self.plan.clone() };
        }
        self.memory.govern(self.plan.dirty_rate_limit.is_some());
        if !self.midway {
            self.memory.begin();
        }
        self.midway = false;
        if let Some(disk) = &mut self.disk {
            disk.begin();
        }
        let began = self.now;
        match self.scenario.synchronisation {
            Synchronisation::AtOnce(time) => self.wait(time.as_secs_f64()),
            Synchronisation::Pieces(time) if last => self.wait(time.as_secs_f64()),
            Synchronisation::Pieces(_) => {}
        }
        if round == 0 && !last {
            self.wait(self.scenario.hints.as_secs_f64());
        }
        self.idle = self.now - began;
        let expected = self.memory.remaining() / self.capacity().max(1.0);
        let disk_time = self.disk.as_ref().map_or(0.0, |disk| disk.pending() / disk.speed());
        let step = self.scenario.tick.as_secs_f64().max((expected + disk_time) / LOOKS);
        let mut passed = false;
        loop {
            if self.is_cut() {
                self.wait(NOTICE);
                self.end_row(round);
                return Err(Broken);
            }
            if self.until.is_some_and(|until| self.now >= until) {
                self.end_row(round);
                return Err(Broken);
            }
            let through = if self.disk.is_some() {
                self.step_with_disk(step, &mut passed)
            } else {
                self.step(step)
            };
            if through || self.now > self.scenario.longest.as_secs_f64() {
                break;
            }
            self.look();
        }
        if self.disk.is_none() || passed {
            self.outcome.memory_passes += 1;
        }
        self.end_row(round);
        Ok(())
    }

    /// Sends memory for up to `step` seconds; true when the round is through.
    fn step(&mut self, step: f64) -> bool {
        let rate = self.link();
        let effort = (self.speed(), guest::factor(&self.scenario.guest.phases, self.now));
        let (used, sent) = self.memory.send(rate, step, effort, &self.plan.delayed);
        self.row.sent += sent * self.scenario.link.page_bytes;
        self.account(used);
        used < step
    }

    /// The same with a disk beside: each has its share of the link.
    fn step_with_disk(&mut self, step: f64, passed: &mut bool) -> bool {
        let bytes = self.link() * self.scenario.link.page_bytes;
        let fixed = self.scenario.settings.memory_share.is_some();
        let parts = f64::from(self.plan.memory_share);
        let share = parts / (1024.0 + parts);
        let pending = self.disk.as_ref().map_or(0.0, Disk::pending);
        let most = self.disk.as_ref().map_or(0.0, Disk::speed);
        let last = self.stopped.is_some();
        let full = self.plan.memory_share == 1024;
        // With a share that was given, memory is sent over and over, as where no policy looks after
        // it.
        let memory_done = *passed && !(fixed && pending > 0.0);
        let (to_disk, to_memory) = if pending <= 0.0 {
            (0.0, if fixed || full || last { bytes } else { 0.0 })
        } else if memory_done {
            (most.min(bytes), 0.0)
        } else {
            let disk = most.min(bytes * (1.0 - share));
            // At equal shares memory takes what a slow disk leaves.
            (disk, if full { bytes - disk } else { bytes * share })
        };
        let storage_bound = to_disk > 0.0 && to_disk >= most;
        let time = if to_disk > 0.0 { step.min(pending / to_disk) } else { step };
        let effort = (self.speed(), guest::factor(&self.scenario.guest.phases, self.now));
        let rate = to_memory / self.scenario.link.page_bytes;
        let (used, sent) = self.memory.send(rate, time, effort, &self.plan.delayed);
        self.row.sent += sent * self.scenario.link.page_bytes;
        let memory_through = used < time;
        // What the disk gets changes when memory is through, and without a disk to wait for that is
        // the end.
        let time =
            if to_disk > 0.0 && (memory_done || fixed || !memory_through) { time } else { used };
        self.memory.advance(time - used, effort.0, effort.1);
        let limit = self.plan.disk_limit.map(|rate| rate.bytes_per_second());
        if let Some(disk) = &mut self.disk {
            disk.advance(time, effort.0, limit);
            disk.send(to_disk * time);
        }
        self.row.disk_sent += to_disk * time;
        self.row.storage += if storage_bound { time } else { 0.0 };
        self.account(time);
        let disk_through = self.disk.as_ref().is_none_or(|disk| disk.pending() <= 0.0);
        if memory_through {
            *passed = true;
            if fixed && !disk_through {
                // It begins anew, while the disk goes on.
                self.outcome.memory_passes += 1;
                self.memory.begin();
                *passed = false;
            }
        }
        if disk_through && !(full || fixed || last) {
            self.midway = true;
            return true;
        }
        disk_through && *passed
    }

    /// A look within a round.
    fn look(&mut self) {
        if self.stopped.is_some() {
            return;
        }
        let remaining = PageCount(self.memory.remaining().ceil() as u64);
        let in_round = seconds(self.gap + self.now - self.row.start);
        let throttle = self.plan.throttle;
        let sent = ByteCount((self.row.sent + self.row.disk_sent) as u64);
        let can_govern = self.can_govern();
        let dirty = self.memory.look();
        let tick =
            Tick { in_round, sent, remaining, dirty, throttle, guest_speed: None, can_govern };
        if let Some(plan) = self.policy.tick(&tick) {
            self.plan = plan;
        }
        self.row.throttle = self.row.throttle.max(self.plan.throttle);
        self.point();
    }

    fn point(&mut self) {
        self.outcome.throttle = self.outcome.throttle.max(self.plan.throttle);
        self.outcome.governed |= self.plan.dirty_rate_limit.is_some();
        self.outcome.points.push(Point {
            at: self.now,
            throttle: self.plan.throttle,
            speed: self.speed(),
            remaining: (self.memory.remaining() + self.following()) * 4096.0,
        });
    }

    /// Pages that follow the guest.
    fn following(&self) -> f64 {
        if self.left.is_some() { self.memory.missing() } else { 0.0 }
    }

    fn end_row(&mut self, round: u32) {
        let row = &mut self.row;
        row.round = round;
        row.seconds = self.now - row.start;
        row.speed = if row.seconds > 0.0 { row.speed / row.seconds } else { 1.0 };
        row.remaining = self.memory.remaining() * 4096.0;
        row.delayed = self.plan.delayed.count();
        row.disk_remaining = self.disk.as_ref().map_or(0.0, Disk::remaining);
        row.disk_limit = self.plan.disk_limit.map(|rate| rate.bytes_per_second());
        self.outcome.sent += row.sent;
        self.outcome.disk_sent += row.disk_sent;
        self.outcome.rounds.push(*row);
    }

    /// Whether the guest is slowed down.
    pub(crate) fn holds_back(&self) -> bool {
        self.plan.throttle > 0.0 || self.plan.dirty_rate_limit.is_some()
    }

    /// Asks the policy at the end of a round; `prepared` says that nothing but the stop is to
    /// follow.
    pub(crate) fn ask(&mut self, prepared: bool) -> (Decision, Estimate) {
        let row = self.row;
        let got_ready = prepared && !self.was_prepared;
        self.was_prepared = prepared;
        let (at_once, synchronisation) = match self.scenario.synchronisation {
            Synchronisation::AtOnce(time) => (true, time),
            Synchronisation::Pieces(time) => (false, time),
        };
        let flush = if self.disk.is_some() { self.scenario.flush } else { Duration::ZERO };
        let verification =
            if self.scenario.verify { self.scenario.verification } else { Duration::ZERO };
        let disk = self.disk.as_ref().map(|disk| DiskStatistics {
            full_pass: disk.full_pass && disk.pending() > 0.0,
            sent: ByteCount(row.disk_sent as u64),
            remaining: ByteCount(disk.remaining() as u64),
            written: ByteCount(disk.written as u64),
            storage: seconds(row.storage),
        });
        let pages = row.sent / self.scenario.link.page_bytes;
        let remaining = PageCount(self.memory.remaining().ceil() as u64);
        let memory = PageCount(self.memory.all_pages());
        let can_govern = self.can_govern();
        let dirty = self.memory.look();
        let (decision, estimate) = self.policy.round(&Round {
            time: seconds(row.seconds + self.gap),
            idle: seconds(self.idle + self.gap),
            gap: synchronisation,
            at_once,
            sent: ByteCount(row.sent as u64),
            pages: PageCount(pages as u64),
            remaining,
            began_with: PageCount(if got_ready { pages as u64 } else { 0 }),
            fixed: synchronisation
                + self.scenario.handover
                + flush
                + self.scenario.link.latency * TURNS,
            lead: if prepared { Duration::ZERO } else { self.scenario.lead }
                + if at_once { Duration::ZERO } else { synchronisation },
            round_trip: self.scenario.link.latency,
            verification,
            memory,
            dirty,
            throttle: self.plan.throttle,
            guest_speed: None,
            can_govern,
            disk,
        });
        if let Some(row) = self.outcome.rounds.last_mut() {
            row.expected = estimate.expected_downtime.map(|time| time.as_secs_f64());
        }
        self.outcome.limit = self.outcome.limit.max(estimate.limit.as_secs_f64());
        self.outcome.expected_downtime =
            estimate.expected_downtime.unwrap_or_default().as_secs_f64();
        self.gap = if at_once { 0.0 } else { synchronisation.as_secs_f64() };
        // What the look has seen is so old when something is made of it.
        self.wait(self.gap);
        match &decision {
            Decision::NextRound(plan) => {
                self.plan = plan.clone();
                if let Some(limit) = plan.disk_limit {
                    let limit = limit.bytes_per_second();
                    self.outcome.disk_limit =
                        Some(self.outcome.disk_limit.map_or(limit, |low| low.min(limit)));
                }
                self.point();
            }
            Decision::SwitchOver => {}
            Decision::GiveUp(advice) => {
                self.outcome.reason = Some(advice.to_string());
                self.plan = Plan::default();
            }
        }
        (decision, estimate)
    }

    /// The guest stands still.
    pub(crate) fn stop(&mut self) {
        self.point();
        self.stopped = Some(self.now);
    }

    /// It runs again, here or there.
    pub(crate) fn runs_again(&mut self) {
        if let Some(stopped) = self.stopped.take() {
            self.outcome.downtime = self.now - stopped;
        }
        self.plan = Plan::default();
        self.point();
    }
}

fn seconds(time: f64) -> Duration {
    Duration::try_from_secs_f64(time).unwrap_or_default()
}
