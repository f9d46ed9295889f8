//! A plan in NATS JetStream, for several coordinators.
//!
//! Without the feature `nats` there is no store to be had, and whoever wants one is told: builds
//! that need none (`make demo`) are spared an async runtime and what it brings.

#[cfg(not(feature = "nats"))]
mod none;
#[cfg(feature = "nats")]
mod store;

use std::path::PathBuf;
use std::time::Duration;

#[cfg(not(feature = "nats"))]
pub use none::NatsStore;
#[cfg(feature = "nats")]
pub use store::NatsStore;

/// Where a server is, and how it knows us.
///
/// ```
/// use godwit_evacuate::NatsOptions;
///
/// let options = NatsOptions::of("nats://192.0.2.5:4222,nats://192.0.2.6:4222", "weekly");
/// assert_eq!((options.replicas, options.silence.as_secs()), (1, 5));
/// ```
#[derive(Clone, Debug)]
pub struct NatsOptions {
    /// Its address, or those of several servers of one cluster, with commas between.
    pub servers: String,
    /// What the evacuation is called.
    pub name: String,
    /// A file of credentials, as `nsc` makes it.
    pub credentials: Option<PathBuf>,
    /// The authority's certificate, ours, and its key.
    pub keys: Option<(PathBuf, PathBuf, PathBuf)>,
    /// Whether a bucket that is not there is made.
    pub make: bool,
    /// Copies of a bucket that is made anew.
    pub replicas: usize,
    /// A coordinator that is not heard of for so long counts as gone.
    pub silence: Duration,
    /// What this coordinator is called, for people.
    pub who: String,
}

impl NatsOptions {
    /// Those for the evacuation `name`, with nothing said of the rest.
    #[must_use]
    pub fn of(servers: &str, name: &str) -> Self {
        Self {
            servers: servers.to_owned(),
            name: name.to_owned(),
            credentials: None,
            keys: None,
            make: true,
            replicas: 1,
            silence: Duration::from_secs(5),
            who: format!("process {}", std::process::id()),
        }
    }
}

/// `servers` without the name and password that may be in them.
fn without_secrets(servers: &str) -> String {
    let plain = |server: &str| match (server.split_once("://"), server.rsplit_once('@')) {
        (Some((scheme, _)), Some((_, place))) => format!("{scheme}://{place}"),
        (None, Some((_, place))) => place.to_owned(),
        _ => server.to_owned(),
    };
    servers.split(',').map(|server| plain(server.trim())).collect::<Vec<_>>().join(",")
}
