//! In which order a worker writes: where, and how much at a time.
//!
//! Keeps two promises: each unit belongs to one worker, so that nobody else ever writes it; and
//! every unit of a worker is written sooner or later. A write never leaves its extent of 1 MiB.
//! The numbers are random but come from a seed: the same seed makes the same writes.

use std::collections::VecDeque;
use std::fmt;
use std::str::FromStr;

use fastrand::Rng;

/// Units in an extent: 1 MiB, which one worker has to itself. Also the largest write.
pub const EXTENT: u64 = 256;

/// An order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// One place after the other, device after device.
    Sequential,
    /// The same, each write to the next device.
    RoundRobin,
    /// Each write cut into pieces, one to every device, at the same place of each.
    Stripe,
    /// Within buffers of 1 MiB, themselves taken at random, small writes in a shuffled order.
    Scattered,
    /// Each place as likely as any other.
    Random,
    /// Nine writes of ten to a tenth of the extents.
    HotCold,
    /// By Zipf's law with the exponent 1: the nth extent about 1/n as often as the first.
    Zipf,
}

impl Pattern {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Sequential,
        Self::RoundRobin,
        Self::Stripe,
        Self::Scattered,
        Self::Random,
        Self::HotCold,
        Self::Zipf,
    ];
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Sequential => "sequential",
            Self::RoundRobin => "round-robin",
            Self::Stripe => "stripe",
            Self::Scattered => "scattered",
            Self::Random => "random",
            Self::HotCold => "hot-cold",
            Self::Zipf => "zipf",
        })
    }
}

/// A text that names no pattern.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is no pattern: use sequential, round-robin, stripe, scattered, random, hot-cold or zipf"
)]
pub struct NoPattern(pub String);

impl FromStr for Pattern {
    type Err = NoPattern;

    fn from_str(text: &str) -> Result<Self, NoPattern> {
        let named = Self::ALL.into_iter().find(|pattern| pattern.to_string() == text);
        named.ok_or_else(|| NoPattern(text.to_owned()))
    }
}

/// One write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The number of the device.
    pub device: usize,
    /// Its first unit.
    pub unit: u64,
    /// How many; none of them beyond the extent.
    pub units: u64,
}

/// The worker that an extent belongs to.
#[must_use]
pub fn owner(device: usize, extent: u64, workers: u64) -> u64 {
    (extent + device as u64) % workers
}

/// A worker's extents of one device.
#[derive(Clone, Copy, Debug)]
struct Lane {
    device: usize,
    first: u64,
    extents: u64,
    stride: u64,
    cursor: u64,
}

impl Lane {
    /// The unit in place `own` of the worker's own ones.
    fn unit(&self, own: u64) -> u64 {
        (self.first + own / EXTENT * self.stride) * EXTENT + own % EXTENT
    }

    /// The next `units`, from the start again after the last.
    fn next(&mut self, units: u64) -> Step {
        if self.cursor % EXTENT + units > EXTENT {
            self.cursor = self.cursor.next_multiple_of(EXTENT);
        }
        if self.cursor >= self.extents * EXTENT {
            self.cursor = 0;
        }
        let step = Step { device: self.device, unit: self.unit(self.cursor), units };
        self.cursor += units;
        step
    }
}

/// The writes of one worker, without end.
///
/// # Examples
/// ```
/// use godwit_stamp::pattern::{Pattern, Walk};
///
/// // Two devices of 4 MiB, writes of 4 KiB, and the first of two workers.
/// let mut walk = Walk::new(Pattern::RoundRobin, &[1], &[4, 4], (0, 2), 7).unwrap();
/// let devices: Vec<usize> = (0..4).map(|_| walk.next_step().device).collect();
/// assert_eq!(devices, [0, 1, 0, 1]);
/// ```
#[derive(Debug)]
pub struct Walk {
    pattern: Pattern,
    sizes: Vec<u64>,
    lanes: Vec<Lane>,
    /// All extents in all lanes, and a stride by which a step through them meets each once.
    extents: u64,
    stride: u64,
    turn: usize,
    pending: VecDeque<Step>,
    random: Rng,
}

impl Walk {
    /// The writes of worker `(number, of how many)` to devices of so many `extents` each. Each
    /// write has one of `sizes`, in units, each as likely. `None`: there is no extent for it.
    ///
    /// # Panics
    /// Without a size from 1 to [`EXTENT`].
    #[must_use]
    pub fn new(
        pattern: Pattern,
        sizes: &[u64],
        extents: &[u64],
        (worker, workers): (u64, u64),
        seed: u64,
    ) -> Option<Self> {
        assert!(!sizes.is_empty() && sizes.iter().all(|size| (1..=EXTENT).contains(size)));
        let lane = |(device, &count): (usize, &u64)| {
            let first = (0..workers).find(|&at| owner(device, at, workers) == worker)?;
            let extents = count.saturating_sub(first).div_ceil(workers);
            let lane = Lane { device, first, extents, stride: workers, cursor: 0 };
            (extents > 0).then_some(lane)
        };
        let lanes: Vec<Lane> = extents.iter().enumerate().filter_map(lane).collect();
        let all: u64 = lanes.iter().map(|lane| lane.extents).sum();
        (all > 0).then(|| Self {
            pattern,
            sizes: sizes.to_vec(),
            lanes,
            extents: all,
            stride: coprime(all),
            turn: 0,
            pending: VecDeque::new(),
            random: Rng::with_seed(seed ^ worker.rotate_left(32)),
        })
    }

    /// The next write.
    pub fn next_step(&mut self) -> Step {
        loop {
            if let Some(step) = self.pending.pop_front() {
                return step;
            }
            let units = self.sizes[self.random.usize(..self.sizes.len())];
            match self.pattern {
                Pattern::Sequential => return self.in_order(units),
                Pattern::RoundRobin => {
                    self.turn = (self.turn + 1) % self.lanes.len();
                    let before = (self.turn + self.lanes.len() - 1) % self.lanes.len();
                    return self.lanes[before].next(units);
                }
                Pattern::Stripe => self.stripe(units),
                Pattern::Scattered => self.scatter(units),
                Pattern::Random => {
                    let at = self.random.u64(..self.extents);
                    return self.within(at, units);
                }
                Pattern::HotCold => {
                    let hot = self.extents.div_ceil(10);
                    let is_hot = hot == self.extents || self.random.u8(..10) < 9;
                    let among = if is_hot { 0..hot } else { hot..self.extents };
                    let rank = self.random.u64(among);
                    return self.within(self.spread(rank), units);
                }
                Pattern::Zipf => {
                    // The inverse of the distribution function, as of a continuous one.
                    let rank = ((self.extents + 1) as f64).powf(self.random.f64()) as u64 - 1;
                    return self.within(self.spread(rank.min(self.extents - 1)), units);
                }
            }
        }
    }

    /// Sequential: when a device is through, the next one.
    fn in_order(&mut self, units: u64) -> Step {
        let lane = &mut self.lanes[self.turn];
        let rest = (lane.extents * EXTENT).saturating_sub(lane.cursor);
        if rest < units {
            lane.cursor = 0;
            self.turn = (self.turn + 1) % self.lanes.len();
        }
        self.lanes[self.turn].next(units)
    }

    fn stripe(&mut self, units: u64) {
        let piece = (units / self.lanes.len() as u64).max(1);
        let steps: Vec<Step> = self.lanes.iter_mut().map(|lane| lane.next(piece)).collect();
        self.pending.extend(steps);
    }

    fn scatter(&mut self, units: u64) {
        let extent = self.random.u64(..self.extents);
        let mut slots: Vec<u64> = (0..EXTENT / units).collect();
        self.random.shuffle(&mut slots);
        for slot in slots {
            let step = self.at(extent, slot * units, units);
            self.pending.push_back(step);
        }
    }

    /// Somewhere in the extent in place `at` of the worker's own.
    fn within(&mut self, at: u64, units: u64) -> Step {
        let slot = self.random.u64(..EXTENT / units);
        self.at(at, slot * units, units)
    }

    fn at(&self, extent: u64, offset: u64, units: u64) -> Step {
        let mut rest = extent;
        for lane in &self.lanes {
            if rest < lane.extents {
                let unit = lane.unit(rest * EXTENT + offset);
                return Step { device: lane.device, unit, units };
            }
            rest -= lane.extents;
        }
        unreachable!("extent {extent} of {}", self.extents)
    }

    /// A place for each rank, so that neighbours in rank are apart on the devices.
    fn spread(&self, rank: u64) -> u64 {
        (u128::from(rank) * u128::from(self.stride) % u128::from(self.extents)) as u64
    }
}

/// A number that has no factor in common with `count`, about 0.6 of it.
fn coprime(count: u64) -> u64 {
    let common = |mut a: u64, mut b: u64| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    let near = (count as f64 * 0.618) as u64;
    (near.max(1)..=near + count).find(|&stride| common(stride, count) == 1).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICES: [u64; 3] = [5, 1, 12];

    fn steps(
        pattern: Pattern,
        sizes: &[u64],
        worker: u64,
        workers: u64,
        count: usize,
    ) -> Vec<Step> {
        let mut walk = Walk::new(pattern, sizes, &DEVICES, (worker, workers), 1).unwrap();
        (0..count).map(|_| walk.next_step()).collect()
    }

    #[test]
    fn a_pattern_is_parsed_as_it_is_printed() {
        for pattern in Pattern::ALL {
            assert_eq!(pattern.to_string().parse(), Ok(pattern));
        }
        assert_eq!("zip".parse::<Pattern>(), Err(NoPattern("zip".to_owned())));
    }

    #[test]
    fn every_step_is_the_workers_own_and_within_one_extent() {
        for pattern in Pattern::ALL {
            for worker in 0..3 {
                for step in steps(pattern, &[1, 4, 256, 3], worker, 3, 5000) {
                    let Step { device, unit, units } = step;
                    assert_eq!(unit / EXTENT, (unit + units - 1) / EXTENT, "{pattern} {step:?}");
                    assert!(unit + units <= DEVICES[device] * EXTENT, "{pattern} {step:?}");
                    assert_eq!(owner(device, unit / EXTENT, 3), worker, "{pattern} {step:?}");
                }
            }
        }
    }

    #[test]
    fn every_unit_is_written_by_its_owner() {
        for pattern in Pattern::ALL {
            let mut written = DEVICES.map(|extents| vec![false; (extents * EXTENT) as usize]);
            for worker in 0..2 {
                for Step { device, unit, units } in steps(pattern, &[8], worker, 2, 40_000) {
                    written[device][unit as usize..][..units as usize].fill(true);
                }
            }
            assert!(written.iter().flatten().all(|&written| written), "{pattern}");
        }
    }

    #[test]
    fn orders_are_what_their_names_say() {
        let at = |pattern| -> Vec<(usize, u64)> {
            steps(pattern, &[64], 0, 1, 6).iter().map(|step| (step.device, step.unit)).collect()
        };
        let in_order = [(0, 0), (0, 64), (0, 128), (0, 192), (0, 256), (0, 320)];
        assert_eq!(at(Pattern::Sequential), in_order);
        let round = [(0, 0), (1, 0), (2, 0), (0, 64), (1, 64), (2, 64)];
        assert_eq!(at(Pattern::RoundRobin), round);
        // A third of 64 units to each.
        let stripe = [(0, 0), (1, 0), (2, 0), (0, 21), (1, 21), (2, 21)];
        assert_eq!(at(Pattern::Stripe), stripe);
        // All slots of one extent before another extent.
        let scattered = steps(Pattern::Scattered, &[16], 0, 1, 16);
        let mut units: Vec<u64> = scattered.iter().map(|step| step.unit % EXTENT).collect();
        assert_ne!(units, (0..16).map(|slot| slot * 16).collect::<Vec<u64>>());
        units.sort_unstable();
        assert_eq!(units, (0..16).map(|slot| slot * 16).collect::<Vec<u64>>());
        assert!(scattered.iter().all(|step| {
            (step.device, step.unit / EXTENT) == (scattered[0].device, scattered[0].unit / EXTENT)
        }));
    }

    /// How often the extents were written, the most often first.
    fn frequencies(pattern: Pattern) -> Vec<usize> {
        let mut walk = Walk::new(pattern, &[1], &[50, 50], (0, 1), 3).unwrap();
        let mut counts = vec![0_usize; 100];
        for _ in 0..100_000 {
            let step = walk.next_step();
            counts[step.device * 50 + (step.unit / EXTENT) as usize] += 1;
        }
        counts.sort_unstable_by(|a, b| b.cmp(a));
        counts
    }

    #[test]
    fn some_extents_are_hotter_than_others() {
        let hot: usize = frequencies(Pattern::HotCold)[..10].iter().sum();
        assert!((88_000..92_000).contains(&hot), "{hot} of 100,000 to the hot tenth");
        let zipf = frequencies(Pattern::Zipf);
        // ln(2) / ln(101) of all, and the tenth about a tenth of that.
        assert!((14_000..16_000).contains(&zipf[0]), "{zipf:?}");
        assert!((1500..2600).contains(&zipf[9]), "{zipf:?}");
        let random = frequencies(Pattern::Random);
        assert!(random[0] < 1200 && random[99] > 800, "{random:?}");
    }

    #[test]
    fn sizes_are_mixed() {
        let mut counts = [0_usize; 2];
        for step in steps(Pattern::Random, &[1, 256], 0, 1, 1000) {
            counts[usize::from(step.units == 256)] += 1;
        }
        assert!(counts.iter().all(|&count| count > 400), "{counts:?}");
    }

    #[test]
    fn a_worker_without_an_extent_has_no_writes() {
        assert!(Walk::new(Pattern::Random, &[1], &[1], (1, 2), 1).is_none());
    }
}
