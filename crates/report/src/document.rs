//! Whatever a page can be made of, told apart by what is in it.

use std::io::{BufRead, Read};

use godwit_units::ByteCount;
use serde_json::Value;

use crate::arrival::Arrival;
use crate::figures::Figures;
use crate::page::page;
use crate::record::{Record, RecordError};

/// More is no file of ours.
const LIMIT: u64 = 64 << 20;

/// What a page can be made of.
///
/// ```
/// use godwit_report::Document;
///
/// let text = r#"{"simulated":true,"hosts":20,"vms":100}"#;
/// let document = Document::read(text.as_bytes())?;
/// assert!(matches!(document, Document::Figures(_)));
/// assert!(document.page().starts_with("<!doctype html>"));
/// # Ok::<(), godwit_report::RecordError>(())
/// ```
#[derive(Clone, Debug)]
pub enum Document {
    /// A migration, as the host saw it that the guest left.
    Migration(Box<Record>),
    /// The same, as the host saw it that took the guest in.
    Arrival(Box<Arrival>),
    /// What a benchmark or a soak has written, or `godwit simulate --json` printed.
    Figures(Figures),
}

impl Document {
    /// Reads one.
    ///
    /// # Errors
    /// What it is not.
    pub fn read(lines: impl BufRead) -> Result<Self, RecordError> {
        let mut text = String::new();
        lines.take(LIMIT).read_to_string(&mut text)?;
        if text.len() as u64 == LIMIT {
            return Err(RecordError::Large(ByteCount(LIMIT)));
        }
        if let Some(figures) = Figures::read(&text) {
            return Ok(Self::Figures(figures));
        }
        // What is one value over several lines would be found wrong in the first of them.
        if let Ok(value) = serde_json::from_str::<Value>(&text)
            && value["event"].is_null()
            && !value["outcome"].is_string()
        {
            return Err(RecordError::Other);
        }
        if Arrival::is_in(&text) {
            return Arrival::read(text.as_bytes()).map(|it| Self::Arrival(Box::new(it)));
        }
        Record::read(text.as_bytes()).map(|it| Self::Migration(Box::new(it)))
    }

    /// One HTML file that shows it.
    #[must_use]
    pub fn page(&self) -> String {
        match self {
            Self::Migration(record) => page(record),
            Self::Arrival(arrival) => arrival.page(),
            Self::Figures(figures) => figures.page(),
        }
    }
}

#[cfg(test)]
mod tests {
    use godwit_engine::report::Measures;

    use super::*;

    #[test]
    fn a_file_is_shown_as_what_it_is_or_refused_as_none_of_them() {
        let read = |text: &str| Document::read(text.as_bytes());
        let moved = "{\"event\":\"disks\"}\n{\"outcome\":\"failed\",\"error\":\"x\"}";
        assert!(matches!(read(moved), Ok(Document::Migration(_))));
        let mut upgraded = serde_json::to_value(Measures::default()).unwrap();
        upgraded["outcome"] = "upgraded".into();
        let upgraded = format!("{{\"event\":\"started\",\"pid\":7}}\n{upgraded}");
        let Ok(Document::Migration(record)) = read(&upgraded) else { panic!("{upgraded}") };
        assert!(matches!(record.ending, crate::Ending::Moved(_)));
        let came = "{\"event\":\"accepted\",\"ram_bytes\":4096}\n\
                    {\"outcome\":\"running\",\"received_bytes\":4096}";
        assert!(matches!(read(came), Ok(Document::Arrival(_))));
        assert!(matches!(read("{\"name\":\"a\",\"targets\":[]}"), Ok(Document::Figures(_))));
        for other in ["{}", "[1,\n2]", "{\n\"measured\": {\"a\": 1}\n}", "3"] {
            let told = read(other).unwrap_err().to_string();
            assert!(told.contains("JSON, but nothing that has a page"), "{other}: {told}");
            assert_eq!(told.lines().count(), 1);
        }
        assert!(matches!(read("no JSON"), Err(RecordError::Line { line: 1, .. })));
        assert!(matches!(read(""), Err(RecordError::Empty)));
    }
}
