//! A store in NATS JetStream, for several coordinators: a key-value bucket for each evacuation.
//!
//! Whoever coordinates writes each value on the condition that nobody has written to the bucket
//! since its own last write (`Nats-Expected-Last-Sequence`). Taking the lease is such a write, too:
//! from then on whatever another still has in its hands is refused by the server, and it learns
//! that it has lost the lease before anything has changed. What operators wish (`wanted`) is
//! written by others meanwhile; then the lease is read again, and if it is still ours, the write is
//! made once more.
//!
//! Values are read from the leader of the stream and never from its copies, which may lag behind.
//!
//! The async runtime is this module's own affair: a thread that keeps the connection and the lease.

use std::fmt::Display;
use std::future::Future;
use std::str::FromStr;
use std::sync::{Arc, Mutex as BlockingMutex, PoisonError};
use std::time::{Duration, Instant};

use async_nats::jetstream::context::{ContextBuilder, GetStreamErrorKind, PublishErrorKind};
use async_nats::jetstream::kv;
use async_nats::jetstream::message::PublishMessage;
use async_nats::jetstream::stream::{self, LastRawMessageErrorKind};
use async_nats::jetstream::{Context, ErrorCode};
use async_nats::{ConnectOptions, ServerAddr};
use serde::{Deserialize, Serialize};
use tokio::runtime::Runtime;
use tokio::sync::Mutex;
use tokio_stream::StreamExt;

use crate::EvacuateError;
use crate::nats::{NatsOptions, without_secrets};
use crate::runner::bytes;
use crate::silence::Silence;
use crate::store::{Lease, Store, Tenure, Wishes};

const LEASE: &str = "lease";
/// The lease is renewed so often before it counts as silent.
const RENEWALS: u32 = 5;
/// How often a write is tried when others write meanwhile.
const TRIES: u32 = 20;
/// Between two looks for what another is making.
const AGAIN: Duration = Duration::from_millis(50);
/// Until a server answers.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// See the module.
#[derive(Debug)]
pub struct NatsStore {
    runtime: Option<Runtime>,
    shared: Arc<Shared>,
    waiting: Silence,
    began: Instant,
}

#[derive(Debug)]
struct Shared {
    context: Context,
    bucket: kv::Store,
    /// The servers, for messages.
    place: String,
    /// For people, and a part that no other has.
    who: String,
    silence: Duration,
    /// Our lease, while it is ours. Whoever writes has this.
    ours: Mutex<Option<Ours>>,
    /// Until when nobody else can have taken it.
    held_until: BlockingMutex<Option<Instant>>,
}

#[derive(Clone, Debug)]
struct Ours {
    number: u64,
    /// The last write to the bucket that we know of.
    sequence: u64,
}

/// A lease as it is written down.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Written {
    /// Nobody, if it was given back.
    holder: Option<String>,
    number: u64,
}

impl NatsStore {
    /// Connects, and opens the bucket of the evacuation, or makes it.
    ///
    /// # Errors
    /// When no server answers, or what it says.
    pub fn connect(options: &NatsOptions) -> Result<Self, EvacuateError> {
        let place = without_secrets(&options.servers);
        let failed = |action, why: &dyn Display| EvacuateError::Store {
            place: place.clone(),
            action,
            why: why.to_string(),
        };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("store")
            .enable_all()
            .build()
            .map_err(|error| failed("opened", &error))?;
        let shared = runtime.block_on(Shared::connect(options, &failed))?;
        let shared = Arc::new(shared);
        runtime.spawn(keep(Arc::clone(&shared)));
        Ok(Self {
            runtime: Some(runtime),
            shared,
            waiting: Silence::of(options.silence),
            began: Instant::now(),
        })
    }

    /// Where it is, without what nobody else is to read.
    #[must_use]
    pub fn place(&self) -> &str {
        &self.shared.place
    }

    /// Who has the lease, and which renewal of it that is.
    ///
    /// # Errors
    /// When the store does not answer.
    pub fn holder(&self) -> Result<Option<(String, u64)>, EvacuateError> {
        let (revision, lease) = self.wait(self.shared.lease())?;
        Ok(lease.holder.map(|holder| (holder, revision)))
    }

    fn wait<T>(&self, future: impl Future<Output = T>) -> T {
        match &self.runtime {
            Some(runtime) => runtime.block_on(future),
            None => unreachable!("it is there until this is dropped"),
        }
    }
}

impl Drop for NatsStore {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Renews the lease for as long as it is ours.
async fn keep(shared: Arc<Shared>) {
    loop {
        tokio::time::sleep(shared.silence / RENEWALS).await;
        let mut ours = shared.ours.lock().await;
        if let Some(number) = ours.as_ref().map(|ours| ours.number) {
            let holder = Some(shared.who.clone());
            // What went wrong is heard by who writes next, or asks whether it is still held.
            let _ = shared.write(&mut ours, LEASE, bytes(&Written { holder, number })).await;
        }
    }
}

/// Why nothing was published.
enum Unpublished {
    /// Somebody else has written.
    Behind,
    Failed(String),
}

impl Shared {
    async fn connect(
        options: &NatsOptions,
        failed: &impl Fn(&'static str, &dyn Display) -> EvacuateError,
    ) -> Result<Self, EvacuateError> {
        let mut connect = ConnectOptions::new()
            .name(format!("godwit evacuate {}", options.name))
            .connection_timeout(ANSWER_LIMIT)
            .request_timeout(Some(ANSWER_LIMIT))
            .reconnect_delay_callback(|_| Duration::from_millis(200));
        if let Some(file) = &options.credentials {
            let read = connect.credentials_file(file).await;
            connect = read.map_err(|error| EvacuateError::Store {
                place: file.display().to_string(),
                action: "read",
                why: error.to_string(),
            })?;
        }
        // The client does not take them from the address by itself.
        if let Some((name, password)) = name_and_password(&options.servers) {
            connect = connect.user_and_password(name, password);
        }
        if let Some((authority, certificate, key)) = &options.keys {
            connect = connect
                .add_root_certificates(authority.clone())
                .add_client_certificate(certificate.clone(), key.clone())
                .require_tls(true);
        }
        let servers: Vec<&str> = options.servers.split(',').map(str::trim).collect();
        let client = connect.connect(servers).await.map_err(|error| EvacuateError::Away {
            place: without_secrets(&options.servers),
            why: chain(&error),
        })?;
        let context =
            ContextBuilder::new().timeout(ANSWER_LIMIT).ack_timeout(ANSWER_LIMIT).build(client);
        let name = format!("godwit-evacuation-{}", options.name);
        let missing = match context.get_stream(format!("KV_{name}")).await {
            Ok(_) => false,
            Err(error) => match error.kind() {
                GetStreamErrorKind::JetStream(why)
                    if why.error_code() == ErrorCode::STREAM_NOT_FOUND =>
                {
                    true
                }
                _ => {
                    let place = without_secrets(&options.servers);
                    return Err(EvacuateError::Away { place, why: chain(&error) });
                }
            },
        };
        if missing && !options.make {
            let place = format!("{} '{}'", without_secrets(&options.servers), options.name);
            return Err(EvacuateError::NoPlan { place });
        }
        if missing {
            // As the client makes a bucket itself; but that asks for the limits of the account
            // first, and does not understand what servers before 2.10 answer.
            let config = stream::Config {
                name: format!("KV_{name}"),
                subjects: vec![format!("$KV.{name}.>")],
                description: Some("an evacuation of godwit's".to_owned()),
                max_messages_per_subject: 1,
                discard: stream::DiscardPolicy::New,
                allow_rollup: true,
                deny_delete: true,
                num_replicas: options.replicas,
                ..stream::Config::default()
            };
            let made = context.create_stream(config).await;
            // Another coordinator may make it at the same moment: servers (2.9.10) were seen to
            // refuse one of the two then (`subjects overlap`), although both want the same. A
            // cluster may take a moment until it knows.
            if let Err(error) = made {
                let is_there = async {
                    while context.get_stream(format!("KV_{name}")).await.is_err() {
                        tokio::time::sleep(AGAIN).await;
                    }
                };
                let waited = tokio::time::timeout(ANSWER_LIMIT, is_there).await;
                waited.map_err(|_| failed("made", &chain(&error)))?;
            }
        }
        let opened = context.get_key_value(&name).await;
        let bucket = opened.map_err(|error| failed("opened", &chain(&error)))?;
        Ok(Self {
            context,
            bucket,
            place: without_secrets(&options.servers),
            who: format!("{}, {:08x}", options.who, fastrand::u32(..)),
            silence: options.silence,
            ours: Mutex::new(None),
            held_until: BlockingMutex::new(None),
        })
    }

    fn away(&self, why: impl Display) -> EvacuateError {
        EvacuateError::Away { place: self.place.clone(), why: why.to_string() }
    }

    fn set_held(&self, until: Option<Instant>) {
        *self.held_until.lock().unwrap_or_else(PoisonError::into_inner) = until;
    }

    /// The value of `key`, and which write that was.
    async fn read(&self, key: &str) -> Result<Option<(u64, Vec<u8>)>, EvacuateError> {
        let subject = self.subject(key);
        match self.bucket.stream.get_last_raw_message_by_subject(&subject).await {
            Ok(message) => Ok(Some((message.sequence, message.payload.to_vec()))),
            Err(error) if error.kind() == LastRawMessageErrorKind::NoMessageFound => Ok(None),
            Err(error) => Err(self.away(chain(&error))),
        }
    }

    fn subject(&self, key: &str) -> String {
        format!("{}{}", self.bucket.prefix, coded(key))
    }

    async fn lease(&self) -> Result<(u64, Written), EvacuateError> {
        let Some((sequence, value)) = self.read(LEASE).await? else {
            return Ok((0, Written::default()));
        };
        let written = serde_json::from_slice(&value).map_err(|error| EvacuateError::Store {
            place: self.place.clone(),
            action: "read",
            why: format!("{LEASE}: {error}"),
        })?;
        Ok((sequence, written))
    }

    /// The last write to the bucket.
    async fn last(&self) -> Result<u64, EvacuateError> {
        let info = self.bucket.stream.get_info().await.map_err(|error| self.away(chain(&error)))?;
        Ok(info.state.last_sequence)
    }

    /// Writes `value`, if the condition in `message` holds.
    async fn publish(&self, key: &str, message: PublishMessage) -> Result<u64, Unpublished> {
        let sent = self.context.send_publish(self.subject(key), message).await;
        let acknowledged = match sent {
            Ok(acknowledgement) => acknowledgement.await,
            Err(error) => Err(error),
        };
        acknowledged.map(|acknowledged| acknowledged.sequence).map_err(|error| match error.kind() {
            PublishErrorKind::WrongLastSequence => Unpublished::Behind,
            _ => Unpublished::Failed(chain(&error)),
        })
    }

    /// Writes `value` down, if the lease is ours.
    async fn write(
        &self,
        slot: &mut Option<Ours>,
        key: &str,
        value: Vec<u8>,
    ) -> Result<(), EvacuateError> {
        let Some(ours) = slot.as_mut() else {
            return Err(EvacuateError::Lost { place: self.place.clone() });
        };
        for _ in 0..TRIES {
            let sent = Instant::now();
            let message = PublishMessage::build()
                .payload(value.clone().into())
                .expected_last_sequence(ours.sequence);
            match self.publish(key, message).await {
                Ok(sequence) => {
                    ours.sequence = sequence;
                    self.set_held(Some(sent + self.silence));
                    return Ok(());
                }
                Err(Unpublished::Failed(why)) => return Err(self.away(why)),
                Err(Unpublished::Behind) => {
                    // In this order: whoever takes the lease after this writes after it, too.
                    let last = self.last().await?;
                    let (_, lease) = self.lease().await?;
                    if (lease.number, lease.holder.as_ref()) != (ours.number, Some(&self.who)) {
                        *slot = None;
                        self.set_held(None);
                        return Err(EvacuateError::Lost { place: self.place.clone() });
                    }
                    ours.sequence = last;
                }
            }
        }
        Err(self.away("others write to it all the time"))
    }
}

impl Store for NatsStore {
    fn read(&self, key: &str) -> Result<Option<Vec<u8>>, EvacuateError> {
        Ok(self.wait(self.shared.read(key))?.map(|(_, value)| value))
    }

    fn put(&mut self, key: &str, value: &[u8]) -> Result<(), EvacuateError> {
        self.wait(async {
            let mut ours = self.shared.ours.lock().await;
            self.shared.write(&mut ours, key, value.to_vec()).await
        })
    }

    fn list(&self, prefix: &str) -> Result<Vec<(String, Vec<u8>)>, EvacuateError> {
        self.wait(async {
            let shared = &self.shared;
            let away = |error| shared.away(chain(&error));
            let all = format!("{}>", shared.bucket.prefix);
            let mut subjects = shared.bucket.stream.info_with_subjects(all).await.map_err(away)?;
            let mut found = Vec::new();
            while let Some(subject) = subjects.next().await {
                let (subject, _) = subject.map_err(away)?;
                let key = decoded(subject.strip_prefix(&shared.bucket.prefix).unwrap_or_default());
                if key.starts_with(prefix)
                    && let Some((_, value)) = shared.read(&key).await?
                {
                    found.push((key, value));
                }
            }
            found.sort();
            Ok(found)
        })
    }

    fn held(&self) -> Result<(), EvacuateError> {
        let until = *self.shared.held_until.lock().unwrap_or_else(PoisonError::into_inner);
        match until {
            Some(until) if Instant::now() < until => Ok(()),
            Some(_) => Err(self.shared.away("it has not answered for too long")),
            None => Err(EvacuateError::Lost { place: self.shared.place.clone() }),
        }
    }

    fn who(&self) -> String {
        self.shared.who.clone()
    }
}

impl Lease for NatsStore {
    fn take(&mut self) -> Result<Tenure, EvacuateError> {
        let shared = Arc::clone(&self.shared);
        let taken = self.wait(async {
            let mut slot = shared.ours.lock().await;
            let last = shared.last().await?;
            let (revision, lease) = shared.lease().await?;
            Ok::<_, EvacuateError>(match lease.holder {
                Some(holder) if holder != shared.who => {
                    *slot = None;
                    shared.set_held(None);
                    Err((last, revision, holder, lease.number))
                }
                holder => {
                    let number = lease.number + u64::from(holder.is_none());
                    Ok(shared.seize(&mut slot, (last, revision), number).await?)
                }
            })
        });
        match taken {
            Err(error) => {
                self.waiting.forget();
                Err(error)
            }
            Ok(Ok(tenure)) => Ok(tenure),
            Ok(Err((last, revision, holder, number))) => {
                if !self.waiting.see(revision, self.began.elapsed()) {
                    return Ok(Tenure::Another(holder));
                }
                self.wait(async {
                    let mut slot = shared.ours.lock().await;
                    shared.seize(&mut slot, (last, revision), number + 1).await
                })
            }
        }
    }

    fn release(&mut self) {
        let shared = Arc::clone(&self.shared);
        self.wait(async {
            let mut slot = shared.ours.lock().await;
            if let Some(number) = slot.as_ref().map(|ours| ours.number) {
                let free = Written { holder: None, number };
                let _ = shared.write(&mut slot, LEASE, bytes(&free)).await;
            }
            *slot = None;
            shared.set_held(None);
        });
    }
}

impl Shared {
    /// Takes the lease as coordinator `number`, if nobody has written since the write `last`, and
    /// to the lease since `revision`: servers before 2.10 do not look at a `last` of 0.
    async fn seize(
        &self,
        slot: &mut Option<Ours>,
        (last, revision): (u64, u64),
        number: u64,
    ) -> Result<Tenure, EvacuateError> {
        let sent = Instant::now();
        let value = bytes(&Written { holder: Some(self.who.clone()), number });
        let message = PublishMessage::build()
            .payload(value.into())
            .expected_last_sequence(last)
            .expected_last_subject_sequence(revision);
        match self.publish(LEASE, message).await {
            Ok(sequence) => {
                *slot = Some(Ours { number, sequence });
                self.set_held(Some(sent + self.silence));
                Ok(Tenure::Ours { number })
            }
            Err(Unpublished::Failed(why)) => Err(self.away(why)),
            Err(Unpublished::Behind) => Ok(Tenure::Another("one that was quicker".to_owned())),
        }
    }
}

impl Wishes for NatsStore {
    fn change(
        &self,
        key: &str,
        change: &dyn Fn(Option<&[u8]>) -> Vec<u8>,
    ) -> Result<(), EvacuateError> {
        let shared = &self.shared;
        self.wait(async {
            for _ in 0..TRIES {
                let now = shared.read(key).await?;
                let value = change(now.as_ref().map(|(_, value)| &value[..]));
                let message = PublishMessage::build()
                    .payload(value.into())
                    .expected_last_subject_sequence(now.map_or(0, |(sequence, _)| sequence));
                match shared.publish(key, message).await {
                    Ok(_) => return Ok(()),
                    Err(Unpublished::Failed(why)) => return Err(shared.away(why)),
                    Err(Unpublished::Behind) => {}
                }
            }
            Err(shared.away("others write to it all the time"))
        })
    }
}

/// The name and password that are in `servers`: of one of them, which all have.
fn name_and_password(servers: &str) -> Option<(String, String)> {
    let mut addresses =
        servers.split(',').filter_map(|server| ServerAddr::from_str(server.trim()).ok());
    addresses
        .find_map(|address| Some((address.username()?.to_owned(), address.password()?.to_owned())))
}

/// An error and what caused it.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text += &format!(": {cause_text}");
        }
        source = cause.source();
    }
    text
}

/// A key as NATS takes it: a dot would end a word of a subject.
fn coded(key: &str) -> String {
    key.replace('.', "=2E")
}

fn decoded(key: &str) -> String {
    key.replace("=2E", ".")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_used_and_not_printed() {
        let servers = "nats://a:secret@h1:4222, tls://h2,b:secret@h3";
        let found = name_and_password(servers);
        assert_eq!(found, Some(("a".to_owned(), "secret".to_owned())));
        assert_eq!(name_and_password("nats://h1,h2"), None);
        assert_eq!(without_secrets(servers), "nats://h1:4222,tls://h2,h3");
    }

    #[test]
    fn a_key_is_one_word_of_a_subject() {
        for key in ["vm/web01", "vm/a.b..c.", "lease"] {
            assert!(!coded(key).contains('.'));
            assert_eq!(decoded(&coded(key)), key);
        }
    }
}
