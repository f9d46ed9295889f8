//! What the connection to a destination carries, tried with bytes that mean nothing, and how far
//! its clock is from ours.
//!
//! Invariant: never more is on the way than a window, so that the destination's answers, which take
//! places of ours, cannot keep it from reading.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use godwit_units::{ByteCount, Rate};
use godwit_wire::{Message, TRIAL_LIMIT};

use super::Source;
use crate::{EngineError, limits};

/// Trials that are on the way at most: 32 MiB, what 10 Gbit/s carry in a round trip of 27 ms.
const WINDOW: u64 = 128;
/// Knuth's, of MMIX: a linear congruential generator, whose numbers nothing on the way compresses.
const MULTIPLIER: u64 = 6_364_136_223_846_793_005;

/// What one connection to a destination was seen to carry, and its clock.
///
/// ```
/// use std::time::Duration;
/// use godwit_engine::source::Trial;
/// use godwit_units::ByteCount;
///
/// let trial = Trial {
///     bytes: ByteCount(1 << 30),
///     time: Duration::from_secs(1),
///     clock_ahead: 0.002,
/// };
/// assert_eq!(trial.rate().bytes_per_second(), 1024.0 * 1024.0 * 1024.0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trial {
    /// What went over it.
    pub bytes: ByteCount,
    /// How long that took.
    pub time: Duration,
    /// How far the destination's clock is ahead of ours, in seconds, to half a round trip.
    pub clock_ahead: f64,
}

impl Trial {
    /// Bytes over time.
    #[must_use]
    pub fn rate(&self) -> Rate {
        Rate::from_bytes_per_second(self.bytes.0 as f64 / self.time.as_secs_f64().max(1e-6))
    }
}

/// Tries for about `time` what the connection carries.
pub(super) fn try_connection(
    source: &mut Source<'_>,
    time: Duration,
    round_trip: Duration,
) -> Result<Trial, EngineError> {
    let filling = filling();
    let begun = Instant::now();
    let (mut sent, mut came, mut clock_ahead) = (0, 0, 0.0);
    while begun.elapsed() < time || came < sent {
        if begun.elapsed() < time && sent - came < WINDOW * filling.len() as u64 {
            source.session.say(&Message::Trial(filling.clone()))?;
            sent += filling.len() as u64;
            // What was answered meanwhile is looked at where there is no more to send.
            continue;
        }
        let what = "the answer to a trial";
        let (bytes, clock) = source.session.await_message(
            source.vm,
            what,
            limits::TRIAL,
            |message| match message {
                Message::Tried { bytes, clock } => Some((*bytes, *clock)),
                _ => None,
            },
        )?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        came = bytes;
        clock_ahead = clock as f64 / 1e9 + round_trip.as_secs_f64() / 2.0 - now.as_secs_f64();
    }
    // The last of them came half a round trip before its answer, and the first took as long.
    let time = begun.elapsed().saturating_sub(round_trip);
    Ok(Trial { bytes: ByteCount(sent), time, clock_ahead })
}

/// Bytes that no compression on the way makes smaller.
fn filling() -> Vec<u8> {
    let mut word = 1_u64;
    let words = std::iter::repeat_with(|| {
        word = word.wrapping_mul(MULTIPLIER).wrapping_add(1);
        (word ^ word >> 29).to_le_bytes()
    });
    words.flatten().take(TRIAL_LIMIT).collect()
}
