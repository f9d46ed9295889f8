//! Where in memory pages were sent, round by round.

use std::fmt::Write;

/// Shades, the darkest of which stands for every page of a part.
const SHADES: usize = 8;

/// A map with a column for each round and a row for each part of memory: `map` has the pages sent
/// by round and part, of parts that have `pages` each. Empty where nothing is known.
pub(crate) fn heat(map: &[Vec<u32>], pages: u64) -> String {
    let parts = map.iter().map(Vec::len).max().unwrap_or(0);
    if parts == 0 {
        return String::new();
    }
    let mut html = format!(
        "<svg class=\"heat\" viewBox=\"0 0 {} {parts}\" preserveAspectRatio=\"none\" role=\"img\" \
         aria-label=\"pages sent, by round and part of memory\">",
        map.len()
    );
    // A path for each shade: an element for each part would take four times as much.
    let mut paths = [const { String::new() }; SHADES];
    for (round, sent) in map.iter().enumerate() {
        let mut from = 0;
        while from < sent.len() {
            let shade = shade(sent[from], pages);
            let same = sent[from..].iter().take_while(|sent| self::shade(**sent, pages) == shade);
            let height = same.count();
            if shade > 0 {
                let _ = write!(paths[shade - 1], "M{round} {from}h1v{height}h-1z");
            }
            from += height;
        }
    }
    for (number, path) in paths.iter().enumerate().filter(|(_, path)| !path.is_empty()) {
        let _ = write!(html, "<path class=\"h{}\" d=\"{path}\"/>", number + 1);
    }
    html + "</svg>"
}

/// How dark a part is of which `sent` of its `pages` were sent: not at all only if none was.
fn shade(sent: u32, pages: u64) -> usize {
    if sent == 0 {
        return 0;
    }
    let share = f64::from(sent) / pages.max(1) as f64;
    ((share.sqrt() * SHADES as f64).ceil() as usize).clamp(1, SHADES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_neighbours_are_one_and_nothing_is_left_white_that_was_sent() {
        assert_eq!(
            (shade(0, 100), shade(1, 100_000), shade(100, 100), shade(900, 100)),
            (0, 1, 8, 8)
        );
        let map = heat(&[vec![100, 100, 0, 100], vec![0, 0, 0, 1]], 100);
        assert!(map.contains("<path class=\"h8\" d=\"M0 0h1v2h-1zM0 3h1v1h-1z\"/>"), "{map}");
        assert!(map.contains("<path class=\"h1\" d=\"M1 3h1v1h-1z\"/>"), "{map}");
        assert!(map.contains("viewBox=\"0 0 2 4\""), "{map}");
        assert_eq!(heat(&[], 1), "");
        assert_eq!(heat(&[vec![]], 1), "");
    }
}
