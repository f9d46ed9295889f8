//! Sockets that a service manager hands over (sd_listen_fds(3)).
//!
//! They outlive a godwitd that is started again: who connects meanwhile waits, and is not refused.

use anyhow::{Context, bail};
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

    /// Where other hosts ask, if that was handed over.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub(crate) fn hosts_at(&self) -> anyhow::Result<Option<Address>> {
        self.hosts.as_ref().map(address).transpose()
    }

    /// Where the operator asks, if that was handed over.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub(crate) fn operator_at(&self) -> anyhow::Result<Option<Address>> {
        self.operator.as_ref().map(address).transpose()
    }
}

fn address(listener: &Listener) -> anyhow::Result<Address> {
    listener.address().context("the address of a socket that was handed over")
}
