//! `--log`: what godwit does, step by step, on standard error.

use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt;
use tracing_subscriber::fmt::format::FmtSpan;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

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

/// Logs from now on. A span is told when it ends, with the time that it took.
pub(crate) fn start(filter: Targets) {
    let lines =
        fmt::layer().with_writer(|| say::Errors).with_ansi(false).with_span_events(FmtSpan::CLOSE);
    // There is no other in this process.
    let _ = tracing_subscriber::registry().with(lines).with(filter).try_init();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_read_for_all_and_for_parts() {
        assert!(filter("debug").is_ok());
        assert!(filter("info,godwit_engine=trace").is_ok());
        assert!(filter("godwit_engine=loud").unwrap_err().contains("neither off, error"));
    }
}
