//! Records of migrations, and pages that show one, or the figures of a benchmark or a simulation.
//!
//! A record is lines of JSON: who moved where and when, what progress was seen (fewer and fewer
//! looks, the longer it took), and how it ended. The lines are those that `godwit migrate --json`
//! and `godwit upgrade --json` print, so the page can be made of them as well. A destination keeps
//! one of its own, of what it has seen.
//!
//! ```text
//!   record   what was seen of one migration, written and read
//!   arrival  the same of its destination, which sees less, and its page
//!   store    the directory in which records are kept, the oldest of which go
//!   totals   what all of them came to, those that have gone too
//!   page     one HTML file with all in it: no script, nothing that is fetched
//!   figures  the same of what benchmarks, soaks and simulations came to
//!   document whichever of them a file is
//!   chart    a plot of values over time
//!   heat     where in memory pages were sent, round by round
//!   spans    the same for tracing systems: what took from when to when
//! ```

#![forbid(unsafe_code)]

mod arrival;
mod chart;
mod document;
mod figures;
mod heat;
mod html;
mod page;
mod record;
mod spans;
mod store;
mod totals;

pub use arrival::{
    Arrival, ArrivalEnding, ArrivalRecorder, Arrived, Fetched, Offered, Outage, Round,
};
pub use document::Document;
pub use figures::Figures;
pub use page::page;
pub use record::{Ending, Head, Moved, Record, RecordError, Recorder, Upgrade};
pub use spans::{Attribute, Span, spans};
pub use store::{Kept, Side, Store};
pub use totals::{Distribution, Totals};
