//! Deltas: what changed in a page since it was sent, as the XOR of both versions, for a codec to
//! make small.
//!
//! The source must have kept the bytes as sent; the destination has them in the guest's memory, as
//! nothing overtakes what was sent before. Whether a delta pays, docs/codecs.md
//! says with figures.

/// Turns `page` into its difference to `base`, or such a difference back into the page: XOR is its
/// own inverse.
///
/// # Panics
/// When both are not of the same length: a mistake of the caller.
pub fn xor(page: &mut [u8], base: &[u8]) {
    assert_eq!(page.len(), base.len(), "a delta is between two versions of the same pages");
    // Plain code that becomes vector code.
    page.iter_mut().zip(base).for_each(|(byte, base)| *byte ^= base);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic::Image;

    #[test]
    fn a_delta_gives_the_page_back() {
        let (old, new) = (Image::Text.bytes(1, 4096), Image::Text.bytes(2, 4096));
        let mut delta = new.clone();
        xor(&mut delta, &old);
        assert_ne!(delta, new);
        xor(&mut delta, &old);
        assert_eq!(delta, new);
        let mut same = old.clone();
        xor(&mut same, &old);
        assert!(crate::is_zero(&same));
    }
}
