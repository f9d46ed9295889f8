//! How the guest dirties memory, learned from looks at its segments, and what follows for rounds to
//! come.
//!
//! A guest that writes at random, `w` times a second over `N` pages, has after a time `t`
//!
//! ```text
//!   d(t) = N · (1 − exp(−λ·t)),   λ = w / N
//! ```
//!
//! of them dirty: its dirty rate falls while the pages it writes are dirty already. A throttle that
//! lets the guest run a share `r` of the time makes `λ` to `r·λ` and leaves `N` as it is. So at a
//! mild throttle a busy guest still dirties all of `N` in every round, and nothing is gained; only
//! when `r·λ·T` gets small for a round of `T` does the remaining data fall.
//!
//! The growth of a segment between two looks is `λ·(N − d)`: a straight line over `d`. Each segment
//! gets its own line, fitted while nothing is throttled. Under a throttle the lines stay and the
//! ratio of observed to expected growth is learned, since no mechanism does exactly what it is
//! told.

use std::time::Duration;

/// One segment's line, as weighted sums.
#[derive(Clone, Copy, Debug, Default)]
struct Segment {
    last: f32,
    top: f32,
    weight: f32,
    d: f32,
    g: f32,
    dd: f32,
    dg: f32,
}

/// Pages that are written alike: `pages` of them, each written `rate` times a second, `dirty` of
/// them dirty.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Class {
    pub(crate) pages: f64,
    pub(crate) rate: f64,
    pub(crate) dirty: f64,
}

/// What is learned about the guest.
#[derive(Clone, Debug)]
pub(crate) struct Guest {
    segments: Vec<Segment>,
    /// Pages in a segment.
    size: f64,
    /// Observed over expected growth under throttle.
    gain: f64,
    /// Whether the gain was ever measured.
    measured: bool,
    /// Growth seen and expected, and the throttle they were seen under, since the gain was last
    /// learned.
    pending: (f64, f64, f64),
}

impl Default for Guest {
    fn default() -> Self {
        Self {
            segments: Vec::new(),
            size: 4096.0,
            gain: 1.0,
            measured: false,
            pending: (0.0, 0.0, 0.0),
        }
    }
}

/// Growth, in pages, below which a look under throttle says too little.
const TELLING: f64 = 64.0;
/// How finely a last round is cut.
const PARTS: usize = 16;

impl Guest {
    /// Takes in a look at all segments, `time` after the one before, with the guest running the
    /// share `1 − throttle`.
    pub(crate) fn look(&mut self, dirty: &[u32], time: Duration, throttle: f64) {
        if self.segments.len() != dirty.len() {
            self.segments = vec![Segment::default(); dirty.len()];
        }
        let seconds = time.as_secs_f64() as f32;
        if seconds < 0.001 {
            return;
        }
        let (mut seen, mut expected) = (0.0, 0.0);
        let size = self.size as f32;
        for (segment, count) in self.segments.iter_mut().zip(dirty) {
            let (now, before) = (*count as f32, segment.last);
            segment.last = now;
            if now == 0.0 && segment.weight == 0.0 || now < before {
                // Clean all along, or harvested in between at a time that nobody knows.
                continue;
            }
            let (level, growth) = ((now + before) / 2.0, (now - before) / seconds);
            if throttle <= 0.0 {
                segment.learn(level, growth, (now - before) / now.max(segment.top).max(1.0));
            } else if let Some((pages, rate)) = segment.line(size) {
                seen += f64::from(now - before);
                expected += f64::from(rate * (pages - level).max(0.0) * seconds);
            }
            segment.top = now.max(segment.top * 0.999);
        }
        if throttle > 0.0 {
            self.learn_gain(seen, expected, throttle);
        }
    }

    /// A look at segments whose growth says nothing of the guest, as it is held to a rate.
    pub(crate) fn note(&mut self, dirty: &[u32]) {
        if self.segments.len() != dirty.len() {
            self.segments = vec![Segment::default(); dirty.len()];
        }
        for (segment, count) in self.segments.iter_mut().zip(dirty) {
            segment.last = *count as f32;
            segment.top = segment.last.max(segment.top);
        }
    }

    fn learn_gain(&mut self, seen: f64, expected: f64, throttle: f64) {
        if self.pending.2 != throttle {
            self.pending = (0.0, 0.0, throttle);
        }
        self.pending.0 += seen;
        self.pending.1 += expected;
        let (seen, expected, _) = self.pending;
        if expected * (1.0 - throttle) > TELLING {
            let gain = (seen / (expected * (1.0 - throttle))).clamp(0.05, 150.0);
            self.gain = if self.measured { 0.6 * self.gain + 0.4 * gain } else { gain };
            self.measured = true;
            self.pending = (0.0, 0.0, throttle);
        }
    }

    /// A round ended with `remaining` pages dirty, and nobody looked at segments: all memory is
    /// one.
    pub(crate) fn look_at_all(&mut self, remaining: u64, time: Duration, throttle: f64) {
        if self.segments.len() != 1 {
            self.segments = vec![Segment::default()];
        }
        let seconds = time.as_secs_f64() as f32;
        if seconds > 0.001 && throttle <= 0.0 {
            let count = remaining as f32;
            // Harvests are spread over the round, so pages had half of it to become dirty.
            let segment = &mut self.segments[0];
            segment.learn(count / 2.0, count / (seconds / 2.0), 0.5);
            segment.top = count.max(segment.top);
        }
        self.segments[0].last = remaining as f32;
    }

    /// The size of a segment follows from all memory.
    pub(crate) fn set_memory(&mut self, pages: u64) {
        if pages > 0 && !self.segments.is_empty() {
            self.size = pages as f64 / self.segments.len() as f64;
        }
    }

    /// Pages in a segment.
    pub(crate) fn segment_pages(&self) -> f64 {
        self.size
    }

    /// The share of its speed at which the guest is expected to dirty under `throttle`.
    pub(crate) fn speed(&self, throttle: f64) -> f64 {
        if throttle <= 0.0 { 1.0 } else { ((1.0 - throttle) * self.gain).min(1.0) }
    }

    /// For a guest that hardly runs, the segments that need not be sent in the next round: the
    /// fewer are sent, the sooner it is over. Those with most dirty pages are sent, as few as bring
    /// what remains, with what is dirtied meanwhile, to `enough`. Empty when all have to be.
    pub(crate) fn spared(&self, unsent: f64, speed: f64, link: Link, enough: f64) -> Vec<usize> {
        let size = self.size as f32;
        let lines: Vec<(f64, f64, f64)> = self
            .segments
            .iter()
            .map(|segment| {
                let dirty = f64::from(segment.last);
                let (pages, rate) = segment.line(size).unwrap_or((segment.last, 0.0));
                (dirty, f64::from(pages).max(dirty), speed * f64::from(rate))
            })
            .collect();
        let mut order: Vec<usize> =
            (0..lines.len()).filter(|index| lines[*index].1 > 0.0).collect();
        order.sort_unstable_by(|a, b| lines[*b].0.total_cmp(&lines[*a].0));
        for part in 1..PARTS {
            let (sent, spared) = order.split_at(order.len() * part / PARTS);
            let mut time =
                (unsent + sent.iter().map(|index| lines[*index].0).sum::<f64>()) / link.pages;
            for _ in 0..4 {
                let pages = sent
                    .iter()
                    .map(|index| lines[*index])
                    .map(|(d, n, l)| n - (n - d) * kept(l * time));
                time = (unsent + pages.sum::<f64>()) / link.pages;
            }
            let left =
                sent.iter().map(|index| lines[*index]).map(|(_, n, l)| n * (1.0 - kept(l * time)));
            let grown = spared
                .iter()
                .map(|index| lines[*index])
                .map(|(d, n, l)| n - (n - d) * (-l * time).exp());
            if left.chain(grown).sum::<f64>() <= enough {
                return spared.to_vec();
            }
        }
        Vec::new()
    }

    /// The guest as a few classes of pages, from the last look.
    pub(crate) fn classes(&self) -> Vec<Class> {
        const CLASSES: usize = 16;
        let mut classes = [Class::default(); CLASSES];
        let mut still = 0.0;
        for segment in &self.segments {
            match segment.line(self.size as f32) {
                Some((pages, rate)) => {
                    let (pages, rate) = (f64::from(pages), f64::from(rate));
                    let number =
                        (rate.log2().floor() + 8.0).clamp(0.0, CLASSES as f64 - 1.0) as usize;
                    let class = &mut classes[number];
                    class.pages += pages;
                    class.rate += pages * rate;
                    class.dirty += f64::from(segment.last).min(pages);
                }
                None => still += f64::from(segment.last),
            }
        }
        let mut found: Vec<Class> = classes
            .into_iter()
            .filter(|class| class.pages > 0.0)
            .map(|class| Class { rate: class.rate / class.pages, ..class })
            .collect();
        if still > 0.0 {
            found.push(Class { pages: still, rate: 0.0, dirty: still });
        }
        found
    }
}

impl Segment {
    fn learn(&mut self, level: f32, growth: f32, weight: f32) {
        // A segment that is dirty all over tells the same again and again; what it told while it
        // grew is kept.
        let weight = weight.clamp(0.01, 1.0);
        let keep = 1.0 - 0.3 * weight;
        self.weight = self.weight * keep + weight;
        self.d = self.d * keep + weight * level;
        self.g = self.g * keep + weight * growth;
        self.dd = self.dd * keep + weight * level * level;
        self.dg = self.dg * keep + weight * level * growth;
    }

    /// Pages written at all and how often each is written in a second, of at most `size` pages.
    fn line(&self, size: f32) -> Option<(f32, f32)> {
        if self.weight <= 0.0 || self.top < 1.0 {
            return None;
        }
        let (level, growth) = (self.d / self.weight, self.g / self.weight);
        let spread = self.dd / self.weight - level * level;
        let most = size.max(self.top);
        let mut pages = most;
        if spread > (0.05 * self.top).powi(2) {
            let slope = (level * growth - self.dg / self.weight) / spread;
            if slope > 0.0 {
                pages = (level + growth / slope).clamp(self.top, most);
            }
        }
        let room = (pages - level).max(0.02 * pages);
        Some((pages, (growth / room).clamp(0.0, 1000.0)))
    }
}

/// What sending is like.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Link {
    /// Pages each second.
    pub(crate) pages: f64,
    /// Time of each round in which nothing is sent.
    pub(crate) idle: f64,
    /// All segments are harvested at once, after that time; else each just before it is sent.
    pub(crate) at_once: bool,
    /// From the decision to switch over until the guest stands still.
    pub(crate) lead: f64,
}

/// Seconds until at most `enough` pages remain at the end of a round, with the guest dirtying at
/// the share `speed` of its rate and `unsent` pages beside; `None` when it does not get there.
pub(crate) fn time_to_finish(
    classes: &[Class],
    unsent: f64,
    speed: f64,
    link: Link,
    enough: f64,
) -> Option<f64> {
    if link.pages <= 0.0 {
        return None;
    }
    let mut classes = classes.to_vec();
    let mut unsent = unsent;
    let mut elapsed = 0.0;
    let mut best = f64::INFINITY;
    for _ in 0..32 {
        let total = unsent + classes.iter().map(|class| class.dirty).sum::<f64>();
        let last: f64 = classes
            .iter()
            .map(|c| (c.pages - c.dirty) * (1.0 - (-speed * c.rate * link.lead).exp()))
            .sum();
        if total + last <= enough {
            return Some(elapsed);
        }
        if total > 0.98 * best {
            return None;
        }
        best = total;
        let time = round(&mut classes, unsent, total, speed, link);
        unsent = 0.0;
        elapsed += time;
        if !elapsed.is_finite() || elapsed > 1e7 {
            return None;
        }
    }
    None
}

/// The classes after a round at `speed`, and the seconds it takes.
pub(crate) fn after_round(
    classes: &[Class],
    unsent: f64,
    speed: f64,
    link: Link,
) -> (Vec<Class>, f64) {
    let mut classes = classes.to_vec();
    let total = unsent + classes.iter().map(|class| class.dirty).sum::<f64>();
    let time = round(&mut classes, unsent, total, speed, link);
    (classes, time)
}

/// One round over all classes; returns what it takes.
fn round(classes: &mut [Class], unsent: f64, total: f64, speed: f64, link: Link) -> f64 {
    let mut time = total / link.pages;
    if link.at_once {
        time += link.idle;
        for class in classes {
            class.dirty = class.pages * (1.0 - (-speed * class.rate * time).exp());
        }
        return time;
    }
    if link.idle > 0.0 {
        for class in classes.iter_mut() {
            class.dirty =
                class.pages - (class.pages - class.dirty) * (-speed * class.rate * link.idle).exp();
        }
    }
    // What is dirtied before its segment's turn comes is sent in this round as well, which makes it
    // longer.
    for _ in 0..12 {
        let sent: f64 = classes
            .iter()
            .map(|c| c.pages - (c.pages - c.dirty) * kept(speed * c.rate * time))
            .sum();
        let longer = (unsent + sent) / link.pages;
        let settled = (longer - time).abs() < 0.01 * longer;
        time = longer;
        if settled {
            break;
        }
    }
    for class in classes {
        class.dirty = class.pages * (1.0 - kept(speed * class.rate * time));
    }
    time + link.idle
}

/// The mean of `exp(−x)` over `x` from 0 to `most`: what stays clean of pages whose turns are
/// spread over a round.
fn kept(most: f64) -> f64 {
    if most < 1e-6 { 1.0 } else { (1.0 - (-most).exp()) / most }
}

#[cfg(test)]
mod tests;
