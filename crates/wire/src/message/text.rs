//! Texts and numbers, in the order in which a payload has them.

use super::limits::{NAME_LIMIT, TEXT_LIMIT};
use crate::WireError;

pub(super) fn put_text(frame: &mut Vec<u8>, text: &str, limit: usize) {
    let text = cut(text, limit);
    frame.extend((text.len() as u16).to_le_bytes());
    frame.extend(text.as_bytes());
}

/// As much of `text` as fits into `limit` bytes, to the end of a character.
fn cut(text: &str, limit: usize) -> &str {
    let mut end = text.len().min(limit);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// The text of an abort. Why a migration ended is worth knowing even where it is damaged, so what
/// nobody can read is replaced: by more bytes than it had, so that the limit has to be kept again.
pub(super) fn reason(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let text: String = text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
    cut(&text, TEXT_LIMIT).to_owned()
}

/// Reads a payload to its end, part by part.
pub(super) struct Reader<'a> {
    pub(super) what: &'static str,
    pub(super) rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) fn take<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let (bytes, rest) =
            self.rest.split_first_chunk().ok_or(WireError::Length { what: self.what })?;
        self.rest = rest;
        Ok(*bytes)
    }

    /// The bytes of a text.
    pub(super) fn text(&mut self, limit: usize) -> Result<&'a [u8], WireError> {
        let length = usize::from(u16::from_le_bytes(self.take()?));
        if length > limit || length > self.rest.len() {
            return Err(WireError::Length { what: self.what });
        }
        let (text, rest) = self.rest.split_at(length);
        self.rest = rest;
        Ok(text)
    }

    /// A name, by which both sides find the same thing and which is shown to people. It is taken as
    /// it is or not at all: what replaces a byte may be longer, and may be the name of another.
    pub(super) fn name(&mut self) -> Result<String, WireError> {
        self.words(NAME_LIMIT)
    }

    /// The same of up to `limit` bytes.
    pub(super) fn words(&mut self, limit: usize) -> Result<String, WireError> {
        let refused = WireError::Name { what: self.what };
        let name = std::str::from_utf8(self.text(limit)?).ok();
        let name = name.filter(|name| !name.chars().any(char::is_control));
        name.map(str::to_owned).ok_or(refused)
    }

    pub(super) fn number(&mut self) -> Result<u64, WireError> {
        Ok(u64::from_le_bytes(self.take()?))
    }

    pub(super) fn end(&self) -> Result<(), WireError> {
        if self.rest.is_empty() { Ok(()) } else { Err(WireError::Length { what: self.what }) }
    }
}
