//! Text in HTML, and what stands around the text of every page.

const STYLE: &str = include_str!("page.css");

/// The longest text of a page, in bytes as they stand there.
const LONGEST: usize = 4096;

/// `text` with nothing in it that HTML would take for its own, and without what is too much of it.
pub(crate) fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len().min(LONGEST));
    for letter in text.chars() {
        if escaped.len() >= LONGEST {
            escaped.push('…');
            break;
        }
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

/// A page with this title, which is its heading, too.
pub(crate) fn document(title: &str, body: &str) -> String {
    let title = escaped(title);
    format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title>\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <style>{STYLE}</style></head><body><main><h1>{title}</h1>{body}</main></body></html>\n"
    )
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
        let cut = self::escaped(&"&".repeat(1000));
        assert!(cut.len() < LONGEST + 10 && cut.ends_with("&amp;…"), "{cut}");
    }
}
