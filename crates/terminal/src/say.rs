//! Printing. In our programs `println!` and its relatives are those of this module, for the
//! standard ones panic when nobody reads any more: a terminal that was closed must not end a
//! migration, least of all in the handover.
//!
//! Invariants:
//! - No output fails a command. What only puts out something ([`ends_quietly`]) ends without a word
//!   when its reader has gone, as `head` does to it; everything else goes on.
//! - Nothing that is printed acts on a terminal: in a name or an error there may be the words of a
//!   peer, a guest's machine or a server. Control characters are shown escaped, here and nowhere
//!   else. Ends of lines are let through, so words of others go through [`line()`] as well.

use std::borrow::Cow;
use std::fmt::{Arguments, Display, Write as _};
use std::io::{self, ErrorKind, Write};
use std::sync::atomic::{AtomicBool, Ordering};

static ENDS_QUIETLY: AtomicBool = AtomicBool::new(false);

/// Output is the only purpose of this process: it ends when nobody reads it.
pub fn ends_quietly() {
    ENDS_QUIETLY.store(true, Ordering::Relaxed);
}

/// Whether a character does something to a terminal, or has it show others elsewhere (Unicode,
/// UAX #9: the marks that turn the direction of what follows).
fn acts(c: char) -> bool {
    c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn escaped(text: &str, stays: impl Fn(char) -> bool) -> Cow<'_, str> {
    let is_shown = |c: char| !acts(c) || stays(c);
    if text.chars().all(is_shown) {
        return Cow::Borrowed(text);
    }
    let mut plain = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_shown(c) {
            plain.push(c);
        } else {
            // As JSON has it, where it stands for the same character. All are in the first plane.
            let _ = write!(plain, "\\u{:04x}", u32::from(c));
        }
    }
    Cow::Owned(plain)
}

/// `text` with control characters as `\u001b`, but for ends of lines and tabulators.
///
/// ```
/// assert_eq!(godwit_terminal::say::plain("a\x1b[2J\n"), "a\\u001b[2J\n");
/// ```
#[must_use]
pub fn plain(text: &str) -> Cow<'_, str> {
    escaped(text, |c| matches!(c, '\n' | '\t'))
}

/// Words of others as a part of one line: they cannot begin another one, which would look like
/// ours.
///
/// ```
/// assert_eq!(godwit_terminal::say::line("a\ngodwit: done"), "a\\u000agodwit: done");
/// ```
#[must_use]
pub fn line(words: impl Display) -> String {
    escaped(&words.to_string(), |_| false).into_owned()
}

/// Writes to standard output, at once.
pub fn out(text: Arguments<'_>) {
    let mut out = io::stdout().lock();
    let written = out.write_all(plain(&text.to_string()).as_bytes()).and_then(|()| out.flush());
    let Err(error) = written else { return };
    if ENDS_QUIETLY.load(Ordering::Relaxed) {
        if error.kind() == ErrorKind::BrokenPipe {
            std::process::exit(0);
        }
        err(format_args!("godwit: cannot write the output: {error}\n"));
        std::process::exit(crate::process::FAILED.into());
    }
}

/// Writes to standard error.
pub fn err(text: Arguments<'_>) {
    // In one piece, as other processes write there, too.
    let _ = io::stderr().lock().write_all(plain(&text.to_string()).as_bytes());
}

/// Begins the line of a terminal at standard error anew: what stands there is to be rewritten.
pub fn rewrite_line() {
    let _ = io::stderr().lock().write_all(REWRITE.as_bytes());
}

/// To the beginning of the line, and nothing in it.
pub(crate) const REWRITE: &str = "\r\x1b[K";

/// Standard error for who writes whole lines to it, as a log does.
#[derive(Clone, Copy, Debug, Default)]
pub struct Errors;

impl Write for Errors {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        err(format_args!("{}", String::from_utf8_lossy(bytes)));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Prints a line to standard output; never panics.
#[macro_export]
macro_rules! println {
    () => { $crate::say::out(format_args!("\n")) };
    ($($text:tt)*) => { $crate::say::out(format_args!("{}\n", format_args!($($text)*))) };
}

/// Prints to standard output; never panics.
#[macro_export]
macro_rules! print {
    ($($text:tt)*) => { $crate::say::out(format_args!($($text)*)) };
}

/// Prints a line to standard error; never panics.
#[macro_export]
macro_rules! eprintln {
    () => { $crate::say::err(format_args!("\n")) };
    ($($text:tt)*) => { $crate::say::err(format_args!("{}\n", format_args!($($text)*))) };
}

/// Prints to standard error; never panics.
#[macro_export]
macro_rules! eprint {
    ($($text:tt)*) => { $crate::say::err(format_args!($($text)*)) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_acts_on_a_terminal_is_shown() {
        let hostile = "a\x1b[2J\x07\u{9b}31m\r\u{202e}b\x7f\0";
        let shown = r"a\u001b[2J\u0007\u009b31m\u000d\u202eb\u007f\u0000";
        assert_eq!((&*plain(hostile), line(hostile)), (shown, shown.to_owned()));
        let ours = "zürich\tà 10 €\n  next\n";
        assert!(matches!(plain(ours), Cow::Borrowed(text) if text == ours));
        assert_eq!(line("x\n\ty"), r"x\u000a\u0009y");
    }

    #[test]
    fn json_means_the_same_afterwards() {
        // serde_json leaves what is above ASCII as it is.
        let value = serde_json::json!({ "error": "\u{9b}2J\x1b\x7f\u{2066}" });
        let text = value.to_string();
        let shown = plain(&text);
        assert!(!shown.chars().any(acts) && shown != text);
        assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).unwrap(), value);
    }
}
