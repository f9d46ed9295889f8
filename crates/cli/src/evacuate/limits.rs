//! What is changed of an evacuation that runs: `--set bandwidth=5Gbit`, `--set at-once=8`.
//!
//! Both ends of the control socket read the same words, so that nothing is refused by the one that
//! the other has let through.

use std::fmt;
use std::str::FromStr;

use godwit_units::{Rate, TypedRate};

/// The most moves at once.
pub(super) const MOST_AT_ONCE: i64 = 64;

/// One limit, as it was typed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Limit {
    /// What all moves together may send.
    Bandwidth(TypedRate),
    /// Moves at once.
    AtOnce(u32),
}

impl FromStr for Limit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some(("bandwidth", rate)) => {
                let rate = rate.parse::<TypedRate>();
                rate.map(Self::Bandwidth).map_err(|error| error.to_string())
            }
            Some(("at-once", number)) => {
                let known =
                    number.parse().ok().filter(|number| (1..=MOST_AT_ONCE).contains(number));
                let number = known.ok_or_else(|| {
                    format!("at-once={number}: write a number of moves, 1 to {MOST_AT_ONCE}")
                })?;
                Ok(Self::AtOnce(number as u32))
            }
            _ => Err(format!(
                "'{text}' is nothing that can be set: write bandwidth=RATE or at-once=N"
            )),
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bandwidth(rate) => write!(f, "bandwidth={rate}"),
            Self::AtOnce(number) => write!(f, "at-once={number}"),
        }
    }
}

/// The line by which `limits` are asked for.
pub(super) fn request(limits: &[Limit]) -> String {
    limits.iter().fold("set".to_owned(), |line, limit| format!("{line} {limit}"))
}

/// The limits that `request` asks for, where those in force are `now`.
///
/// # Errors
/// What is wrong with it.
pub(super) fn asked(request: &str, now: (Rate, u32)) -> Result<(Rate, u32), String> {
    let mut words = request.split_whitespace();
    if words.next() != Some("set") {
        return Err(format!("'{request}' is not understood: is the other godwit of this release?"));
    }
    words.try_fold(now, |(budget, at_once), word| {
        Ok(match word.parse()? {
            Limit::Bandwidth(rate) => (rate.rate(), at_once),
            Limit::AtOnce(number) => (budget, number),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_typed_is_what_the_other_end_reads() {
        let now = (Rate::from_bytes_per_second(1e6), 4);
        let typed = ["bandwidth=800Mbit", "at-once=8"].map(|text| text.parse().unwrap());
        let line = request(&typed);
        assert_eq!(line, "set bandwidth=800Mbit at-once=8");
        assert_eq!(asked(&line, now), Ok((Rate::from_bytes_per_second(1e8), 8)));
        assert_eq!(asked(&request(&typed[..1]), now), Ok((Rate::from_bytes_per_second(1e8), 4)));
        assert_eq!(asked(&request(&typed[1..]), now), Ok((now.0, 8)));
    }

    #[test]
    fn what_cannot_be_set_is_told() {
        let told = |text: &str| text.parse::<Limit>().unwrap_err();
        assert!(told("bandwidth=1G").contains("write 1Gbit"), "{}", told("bandwidth=1G"));
        assert!("bandwidth=0bit".parse::<Limit>().is_err(), "--pause is for that");
        for text in ["at-once=0", "at-once=65", "at-once=", "at-once=-1", "at-once=many"] {
            assert!(told(text).contains("1 to 64"), "{}", told(text));
        }
        assert!(told("nice=3").contains("bandwidth=RATE or at-once=N"), "{}", told("nice=3"));
        let now = (Rate::ZERO, 1);
        assert!(asked("set at-once=0", now).unwrap_err().contains("1 to 64"));
        assert!(asked("explode", now).unwrap_err().contains("not understood"));
    }
}
