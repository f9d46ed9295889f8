//! Lists of numbers, as of processors.

use std::ops::RangeInclusive;

/// The ranges of a list such as `0-3,8`, as cpuset(7) describes it and Linux writes it in sysfs.
///
/// # Errors
/// The part that is no number and no range of two, the greater one last.
///
/// ```
/// use godwit_units::parse_ranges;
///
/// assert_eq!(parse_ranges("0-3,8"), Ok(vec![0..=3, 8..=8]));
/// assert_eq!(parse_ranges("0,3-1"), Err("3-1"));
/// ```
pub fn parse_ranges(text: &str) -> Result<Vec<RangeInclusive<usize>>, &str> {
    text.split(',').map(|part| range(part).ok_or(part)).collect()
}

fn range(part: &str) -> Option<RangeInclusive<usize>> {
    let (first, last) = part.split_once('-').unwrap_or((part, part));
    let (first, last) = (number(first)?, number(last)?);
    (first <= last).then_some(first..=last)
}

fn number(text: &str) -> Option<usize> {
    // No sign: parse() takes one.
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| digits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_names_no_range_is_told() {
        for (text, wrong) in [
            ("", ""),
            (",", ""),
            ("0,,1", ""),
            ("0-", "0-"),
            ("-1", "-1"),
            ("+1", "+1"),
            ("0--2", "0--2"),
            ("2,3-1,4", "3-1"),
            ("99999999999999999999", "99999999999999999999"),
        ] {
            assert_eq!(parse_ranges(text), Err(wrong), "{text}");
        }
    }
}
