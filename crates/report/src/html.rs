//! Text in HTML.

/// `text` with nothing in it that HTML would take for its own.
pub(crate) fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            // Others than these have no business in a page (W3C, Character Model).
            letter if letter.is_control() && letter != '\n' && letter != '\t' => {
                escaped.push('\u{fffd}');
            }
            letter => escaped.push(letter),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_become_markup() {
        let name = "<script>alert('&\"')</script>\u{1b}[2J";
        let escaped = escaped(name);
        assert!(!escaped.contains(['<', '>', '"', '\'', '\u{1b}']), "{escaped}");
        assert!(escaped.starts_with("&lt;script&gt;"), "{escaped}");
        assert_eq!(self::escaped("web-01 (a)"), "web-01 (a)");
    }
}
