//! What a migration was made of, for an OpenTelemetry collector: spans over OTLP (HTTP, JSON), sent
//! when it is over, since nothing must wait for a collector before.
//!
//! Headers and the time that a collector has to answer are those of the environment, as for every
//! OpenTelemetry exporter (OTEL_EXPORTER_OTLP_HEADERS, OTEL_EXPORTER_OTLP_TIMEOUT). So is who
//! started it: TRACEPARENT, as of W3C's Trace Context, makes all spans part of that trace.

/// Where a collector listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Collector(String);

impl std::str::FromStr for Collector {
    type Err = String;

    /// A base address, to which the path of spans is added, as the variable
    /// OTEL_EXPORTER_OTLP_ENDPOINT has it; or one with a path of its own.
    fn from_str(text: &str) -> Result<Self, String> {
        let refused = || format!("{text:?}: give an address such as http://127.0.0.1:4318");
        let rest = text.strip_prefix("http://").or_else(|| text.strip_prefix("https://"));
        let rest = rest.ok_or_else(refused)?;
        let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
        let plain = |part: &str| !part.contains(|c: char| c.is_whitespace() || c.is_control());
        if host.is_empty() || !plain(text) {
            return Err(refused());
        }
        let base = text.trim_end_matches('/');
        Ok(Self(if path.is_empty() { format!("{base}/v1/traces") } else { text.to_owned() }))
    }
}

impl std::fmt::Display for Collector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// Tells the collector of a migration.
///
/// # Errors
/// When it does not take it.
#[cfg(not(feature = "otlp"))]
pub(crate) fn send(_: &godwit_report::Record, _: &Collector) -> anyhow::Result<()> {
    anyhow::bail!("this godwit was built without it: build it with the feature `otlp`")
}

#[cfg(feature = "otlp")]
pub(crate) use exporter::send;

#[cfg(feature = "otlp")]
mod exporter {
    use std::collections::HashMap;
    use std::time::{Duration, UNIX_EPOCH};

    use anyhow::Context;
    use godwit_report::{Attribute, Record, Span, spans};
    use opentelemetry::propagation::TextMapPropagator;
    use opentelemetry::trace::{
        SpanContext, SpanId, SpanKind, Status, TraceContextExt, TraceFlags, TraceState,
    };
    use opentelemetry::{InstrumentationScope, KeyValue, Value};
    use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
    use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
    use opentelemetry_sdk::Resource;
    use opentelemetry_sdk::propagation::TraceContextPropagator;
    use opentelemetry_sdk::trace::{
        IdGenerator, RandomIdGenerator, SpanData, SpanEvents, SpanExporter as _, SpanLinks,
    };

    use super::Collector;

    /// A collector that does not answer within this is given up; the environment may say less.
    const LIMIT: Duration = Duration::from_secs(10);

    /// Requests by a library that has no threads of its own.
    #[derive(Debug)]
    struct Client(ureq::Agent);

    impl Client {
        fn new() -> Self {
            let config = ureq::Agent::config_builder().timeout_global(Some(LIMIT));
            // What it answers is looked at by who asked.
            Self(config.http_status_as_error(false).build().into())
        }
    }

    #[async_trait::async_trait]
    impl HttpClient for Client {
        async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
            let (head, body) = request.into_parts();
            let answer = self.0.run(Request::from_parts(head, body.to_vec()))?;
            let (head, mut body) = answer.into_parts();
            Ok(Response::from_parts(head, body.read_to_vec()?.into()))
        }
    }

    /// Tells the collector of a migration.
    ///
    /// # Errors
    /// When it does not take it.
    pub(crate) fn send(record: &Record, collector: &Collector) -> anyhow::Result<()> {
        let words = || format!("the OpenTelemetry collector at {collector} was not told");
        let mut exporter = SpanExporter::builder()
            .with_http()
            .with_protocol(Protocol::HttpJson)
            .with_endpoint(collector.to_string())
            .with_http_client(Client::new())
            .build()
            .with_context(words)?;
        let attributes = [
            KeyValue::new("host.name", record.head.host.clone()),
            KeyValue::new("service.version", record.head.version.clone()),
        ];
        let resource = Resource::builder_empty().with_service_name("godwit");
        exporter.set_resource(&resource.with_attributes(attributes).build());
        let batch = batch(record, std::env::var("TRACEPARENT").ok());
        futures_executor::block_on(exporter.export(batch)).with_context(words)
    }

    /// The spans as the exporter wants them, within the one that `parent` names, if it does.
    fn batch(record: &Record, parent: Option<String>) -> Vec<SpanData> {
        let carrier: HashMap<String, String> =
            parent.into_iter().map(|parent| ("traceparent".to_owned(), parent)).collect();
        let context = TraceContextPropagator::new().extract(&carrier);
        let caller = context.span().span_context().clone();
        let ids = RandomIdGenerator::default();
        let trace = if caller.is_valid() { caller.trace_id() } else { ids.new_trace_id() };
        let began = UNIX_EPOCH + Duration::from_millis(record.head.began_ms.unwrap_or_default());
        let spans = spans(record);
        let own: Vec<SpanId> = spans.iter().map(|_| ids.new_span_id()).collect();
        let data = |(span, id): (Span, &SpanId)| SpanData {
            span_context: SpanContext::new(
                trace,
                *id,
                TraceFlags::SAMPLED,
                false,
                TraceState::default(),
            ),
            parent_span_id: span.parent.map_or(caller.span_id(), |parent| own[parent]),
            parent_span_is_remote: span.parent.is_none() && caller.is_valid(),
            span_kind: SpanKind::Internal,
            name: span.name.into(),
            start_time: began + span.start,
            end_time: began + span.end,
            attributes: span.attributes.into_iter().map(key_value).collect(),
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: span.error.map_or(Status::Unset, Status::error),
            instrumentation_scope: InstrumentationScope::builder("godwit").build(),
        };
        spans.into_iter().zip(&own).map(data).collect()
    }

    fn key_value((name, value): (&'static str, Attribute)) -> KeyValue {
        let value = match value {
            Attribute::Text(text) => Value::from(text),
            Attribute::Count(count) => Value::I64(i64::try_from(count).unwrap_or(i64::MAX)),
            Attribute::Number(number) => Value::F64(number),
        };
        KeyValue::new(name, value)
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        fn record() -> Record {
            let lines = r#"{"event":"record","vm":"web01","to":"east:7000","began_ms":7000}
{"outcome":"failed","error":"the link broke","guest":"source"}"#;
            Record::read(lines.as_bytes()).unwrap()
        }

        #[test]
        fn spans_are_within_the_one_that_started_it() {
            // Mutations: the caller is forgotten; each span has a trace of its own.
            let caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
            let batch = batch(&record(), Some(caller.to_owned()));
            let context = &batch[0].span_context;
            assert_eq!(context.trace_id().to_string(), "0af7651916cd43dd8448eb211c80319c");
            assert_eq!(batch[0].parent_span_id.to_string(), "b7ad6b7169203331");
            assert_eq!(batch[0].start_time, UNIX_EPOCH + Duration::from_secs(7));
            assert_eq!(batch[0].status, Status::error("the link broke"));
            for parent in [None, Some("nonsense".to_owned())] {
                let batch = super::batch(&record(), parent);
                assert_eq!(batch[0].parent_span_id, SpanId::INVALID);
                assert!(batch[0].span_context.is_valid());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_collector_has_an_address_and_the_path_of_spans() {
        let at = |text: &str| text.parse::<Collector>().map(|it| it.to_string());
        for (text, expected) in [
            ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
            ("https://collector/", "https://collector/v1/traces"),
            ("http://collector:4318/of/mine", "http://collector:4318/of/mine"),
        ] {
            assert_eq!(at(text).as_deref(), Ok(expected));
        }
        for wrong in ["", "collector:4318", "ftp://c", "http://", "http:///v1", "http://a b", "é"]
        {
            assert!(at(wrong).is_err(), "{wrong:?}");
        }
    }
}
