//! What a link does to what it carries. Pure.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use godwit_units::{ByteCount, Rate, parse_duration};

/// The conditions of an emulated link, the same in both directions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Conditions {
    /// How much it carries each way; `None`: as much as comes.
    pub rate: Option<Rate>,
    /// How long a packet travels; a round trip takes twice as long.
    pub delay: Duration,
    /// At most so much longer, at random; packets stay in their order.
    pub jitter: Duration,
    /// The share of packets that do not arrive.
    pub loss: f64,
    /// What waits to be sent, at most; what comes then is dropped. Without a rate nothing waits.
    pub queue: ByteCount,
    /// What follows from chance follows from this number.
    pub seed: u64,
}

/// What a queue holds unless it is told: as much as is sent in this time.
const QUEUE: Duration = Duration::from_millis(50);
/// And at least two of TCP's largest packets.
const LEAST_QUEUE: u64 = 128 << 10;

impl Default for Conditions {
    fn default() -> Self {
        Self {
            rate: None,
            delay: Duration::ZERO,
            jitter: Duration::ZERO,
            loss: 0.0,
            queue: ByteCount(LEAST_QUEUE),
            seed: 1,
        }
    }
}

impl Conditions {
    /// A link of `rate` whose round trip takes `round_trip`, with a queue of 50 ms, and neither
    /// jitter nor losses.
    #[must_use]
    pub fn new(rate: Rate, round_trip: Duration) -> Self {
        let queue = (rate.bytes_per_second() * QUEUE.as_secs_f64()) as u64;
        Self {
            rate: Some(rate),
            delay: round_trip / 2,
            queue: ByteCount(queue.max(LEAST_QUEUE)),
            ..Self::default()
        }
    }

    /// The same that loses this share of its packets.
    #[must_use]
    pub fn with_loss(self, loss: f64) -> Self {
        Self { loss, ..self }
    }
}

impl fmt::Display for Conditions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rate, delay, jitter, loss, queue, seed } = self;
        if let Some(rate) = rate {
            write!(f, "rate={:.0}bit ", rate.bytes_per_second() * 8.0)?;
        }
        let [delay, jitter] = [delay, jitter].map(Duration::as_micros);
        write!(f, "delay={delay}us jitter={jitter}us loss={loss} queue={}B seed={seed}", queue.0)
    }
}

impl FromStr for Conditions {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let mut conditions = Self::default();
        for word in text.split_whitespace() {
            let (name, value) = word
                .split_once('=')
                .with_context(|| format!("'{word}': a condition is written as in delay=5ms"))?;
            let wrong = || format!("'{word}' is no {name}");
            match name {
                "rate" => conditions.rate = Some(value.parse().with_context(wrong)?),
                "delay" => conditions.delay = parse_duration(value).with_context(wrong)?,
                "jitter" => conditions.jitter = parse_duration(value).with_context(wrong)?,
                "loss" => conditions.loss = value.parse().with_context(wrong)?,
                "queue" => conditions.queue = value.parse().with_context(wrong)?,
                "seed" => conditions.seed = value.parse().with_context(wrong)?,
                _ => bail!("'{word}': there are rate, delay, jitter, loss, queue and seed"),
            }
        }
        ensure!(
            (0.0..=1.0).contains(&conditions.loss),
            "loss={}: it is a share, from 0 to 1",
            conditions.loss
        );
        Ok(conditions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_are_read_as_they_are_written() {
        let rate = Rate::from_bytes_per_second(12_500_000.0);
        let conditions = Conditions {
            jitter: Duration::from_micros(1500),
            seed: 7,
            ..Conditions::new(rate, Duration::from_millis(20)).with_loss(0.001)
        };
        assert_eq!(conditions.to_string().parse::<Conditions>().unwrap(), conditions);
        assert_eq!((conditions.delay, conditions.queue.0), (Duration::from_millis(10), 625_000));
        assert_eq!("".parse::<Conditions>().unwrap(), Conditions::default());
    }

    #[test]
    fn what_is_wrong_with_a_condition_is_told() {
        let said = |text: &str| format!("{:#}", text.parse::<Conditions>().unwrap_err());
        assert!(said("delay").contains("'delay': a condition is written as in delay=5ms"));
        assert!(said("speed=5").contains("there are rate, delay, jitter"));
        assert!(said("delay=soon").contains("'delay=soon' is no delay"), "{}", said("delay=soon"));
        assert!(said("loss=5").contains("a share, from 0 to 1"));
    }
}
