//! What channels look at while they run and the main thread may change.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::compression::Compression;

/// How often the host's idle processors are looked at, at the most: the kernel counts in steps of
/// 10 ms.
const LOOK: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(super) struct Live {
    compression: Mutex<Compression>,
    /// Idle processors for each channel, as the bits of an f64.
    idle: AtomicU64,
}

impl Live {
    pub(super) fn new(compression: Compression) -> Self {
        Self { compression: Mutex::new(compression), idle: AtomicU64::new(1f64.to_bits()) }
    }

    pub(super) fn compression(&self) -> Compression {
        *self.compression.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_compression(&self, compression: Compression) {
        *self.compression.lock().unwrap_or_else(PoisonError::into_inner) = compression;
    }

    /// Idle processors for each channel.
    pub(super) fn idle(&self) -> f64 {
        f64::from_bits(self.idle.load(Ordering::Relaxed))
    }

    fn set_idle(&self, processors: f64) {
        self.idle.store(processors.to_bits(), Ordering::Relaxed);
    }
}

/// Watches how many processors of this host idle.
#[derive(Debug)]
pub(super) struct IdleWatch {
    last: Option<(Instant, f64)>,
}

impl IdleWatch {
    pub(super) fn new() -> Self {
        Self { last: idle_seconds().map(|idle| (Instant::now(), idle)) }
    }

    /// Forgets what was before: the processors idle while a migration is set up.
    pub(super) fn begin(&mut self) {
        *self = Self::new();
    }

    /// Processors that idled since the last answer; `None` when that was just now.
    fn look(&mut self) -> Option<f64> {
        let (then, before) = self.last?;
        let passed = then.elapsed();
        if passed < LOOK {
            return None;
        }
        let idle = idle_seconds()?;
        self.last = Some((Instant::now(), idle));
        Some(((idle - before) / passed.as_secs_f64()).max(0.0))
    }

    /// Tells so many `channels` now and then how many processors idle.
    pub(super) fn tell(&mut self, live: &Live, channels: usize) {
        if let Some(idle) = self.look() {
            live.set_idle(idle / channels.max(1) as f64);
        }
    }
}

/// The second number of /proc/uptime: the seconds that all processors have idled, summed up
/// (proc(5)).
fn idle_seconds() -> Option<f64> {
    std::fs::read_to_string("/proc/uptime").ok()?.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_processors_are_a_number_of_processors() {
        assert!(idle_seconds().unwrap() > 0.0);
        let mut watch = IdleWatch::new();
        assert_eq!(watch.look(), None);
        let (then, idle) = watch.last.unwrap();
        watch.last = Some((then.checked_sub(Duration::from_secs(2)).unwrap(), idle - 3.0));
        let seen = watch.look().unwrap();
        assert!((1.4..1.7).contains(&seen), "{seen}");

        // Shared among channels, of which there is always one; between two looks nothing changes.
        let live = Live::new(Compression::Auto);
        for (channels, least) in [(2, 0.7), (0, 1.4)] {
            let (then, idle) = watch.last.unwrap();
            watch.last = Some((then.checked_sub(Duration::from_secs(2)).unwrap(), idle - 3.0));
            watch.tell(&live, channels);
            let told = live.idle();
            assert!((least..1.2 * least).contains(&told), "{told}");
            watch.last = IdleWatch::new().last;
            watch.tell(&live, 9);
            assert_eq!(live.idle().to_bits(), told.to_bits());
        }
    }
}
