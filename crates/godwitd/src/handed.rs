//! Sockets that a service manager hands over (sd_listen_fds(3)).
//!
//! They outlive a godwitd that is started again: who connects meanwhile waits, and is not refused.

use std::path::PathBuf;

use anyhow::{Context, anyhow, bail};
use godwit_engine::address::{Address, Listener};
use listenfd::ListenFd;

/// What was handed over.
#[derive(Debug, Default)]
pub(crate) struct Handed {
    /// Where other hosts ask: a TCP socket.
    pub(crate) hosts: Option<Listener>,
    /// Where the operator asks: a unix socket.
    pub(crate) operator: Option<Listener>,
}

impl Handed {
    /// Takes what the environment tells of. To be called before any thread is started, since it
    /// takes that out of the environment as well.
    ///
    /// # Errors
    /// When it is something else than one of each.
    pub(crate) fn take() -> anyhow::Result<Self> {
        let (mut sockets, mut handed) = (ListenFd::from_env(), Self::default());
        for index in 0..sockets.len() {
            let what = || format!("socket {} that was handed over", index + 1);
            let (place, name, listener) = if let Ok(Some(socket)) = sockets.take_tcp_listener(index)
            {
                (&mut handed.hosts, "hosts", Listener::inherited(socket))
            } else if let Ok(Some(socket)) = sockets.take_unix_listener(index) {
                (&mut handed.operator, "the operator", Listener::inherited(socket))
            } else {
                bail!("{}: it must be a stream socket of TCP or unix", what());
            };
            let listener =
                listener.with_context(|| format!("{}: write Accept=no into its unit", what()))?;
            if place.replace(listener).is_some() {
                bail!("{}: there is one for {name} already", what());
            }
        }
        Ok(handed)
    }

    /// Where other hosts ask, and where the operator does, if that was handed over.
    ///
    /// # Errors
    /// When the kernel does not tell, or a unix socket has no file.
    pub(crate) fn places(&self) -> anyhow::Result<Places> {
        let of = |listener: &Option<Listener>| {
            let address = listener.as_ref().map(Listener::address).transpose();
            address.context("the address of a socket that was handed over")
        };
        let operator = of(&self.operator)?.map(|address| match address {
            Address::Unix(path) => Ok(path),
            other => Err(anyhow!("{other}: the operator asks at a unix socket")),
        });
        Ok(Places { hosts: of(&self.hosts)?, operator: operator.transpose()? })
    }
}

/// Where the sockets are that were handed over.
#[derive(Debug, Default)]
pub(crate) struct Places {
    /// Where other hosts ask.
    pub(crate) hosts: Option<Address>,
    /// Where the operator asks.
    pub(crate) operator: Option<PathBuf>,
}
