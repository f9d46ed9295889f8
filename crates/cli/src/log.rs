//! `--log`: what godwit does, step by step, on standard error, for people or for programs.

use clap::ValueEnum;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::FmtSpan;
use tracing_subscriber::fmt::{self, MakeWriter};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry};

use crate::say;

/// Reads a level, or levels for parts of godwit.
pub(crate) fn filter(text: &str) -> Result<Targets, String> {
    let wrong = || {
        format!(
            "'{text}' is neither off, error, warn, info, debug nor trace, nor one of them for each \
             of several parts, as in godwit_engine=debug"
        )
    };
    text.parse().map_err(|_| wrong())
}

/// How a step is written down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    Text,
    /// An object a line.
    Json,
}

/// Logs from now on. A span is told when it ends, with the time that it took.
pub(crate) fn start(filter: Targets, format: Format) {
    let lines = lines(format, || say::Errors);
    // There is no other in this process.
    let _ = tracing_subscriber::registry().with(lines).with(filter).try_init();
}

fn lines<W>(format: Format, writer: W) -> Box<dyn Layer<Registry> + Send + Sync>
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let lines = fmt::layer().with_writer(writer).with_ansi(false).with_span_events(FmtSpan::CLOSE);
    match format {
        Format::Text => lines.boxed(),
        Format::Json => lines.json().boxed(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write};
    use std::sync::{Arc, Mutex};

    use serde_json::Value;

    use super::*;

    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<u8>>>);

    impl Write for Kept {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// What is logged of a step within a span, with a text that would end a line.
    fn logged(format: Format) -> String {
        let kept = Kept::default();
        let writer = kept.clone();
        let log = tracing_subscriber::registry()
            .with(lines(format, move || writer.clone()))
            .with(filter("debug").unwrap());
        tracing::subscriber::with_default(log, || {
            let span = tracing::info_span!("round", number = 3);
            let _within = span.enter();
            tracing::info!(pages = 7, "a \"name\"\nof two lines");
        });
        let bytes = kept.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn each_line_of_a_log_for_programs_is_an_object() {
        // Mutation: the format is not heeded.
        let text = logged(Format::Json);
        let lines: Vec<Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 2, "the step, and the end of the span: {text}");
        for line in &lines {
            assert!(line["timestamp"].is_string(), "{line}");
            assert_eq!(line["level"], "INFO");
            assert!(line["target"].as_str().unwrap().starts_with("godwit::log"), "{line}");
            assert_eq!(
                (&line["span"]["name"], &line["span"]["number"]),
                (&"round".into(), &3.into())
            );
        }
        assert_eq!(lines[0]["fields"]["message"], "a \"name\"\nof two lines");
        assert_eq!(lines[0]["fields"]["pages"], 7);
        assert!(lines[1]["fields"]["time.busy"].is_string(), "{}", lines[1]);
    }

    #[test]
    fn a_log_for_people_is_text() {
        let text = logged(Format::Text);
        assert!(text.contains("INFO round{number=3}: godwit::log"), "{text}");
    }

    #[test]
    fn levels_are_read_for_all_and_for_parts() {
        assert!(filter("debug").is_ok());
        assert!(filter("info,godwit_engine=trace").is_ok());
        assert!(filter("godwit_engine=loud").unwrap_err().contains("neither off, error"));
    }
}
