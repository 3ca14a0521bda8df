//! Writing. Small objects are one request; larger ones go up in parts, several at once, each tried
//! again by itself. A stream has no name before its end, so its parts become an object below
//! `tmp/`, which the server then copies to its name and which is deleted.
//!
//! What a killed process leaves below `tmp/` is removed by a later process's first upload, once it
//! is a day old. Dropped writers end their uploads.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::{Duration, Instant, SystemTime};

use aws_sdk_s3::Client;
use aws_sdk_s3::config::http::HttpResponse;
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_s3::primitives::ByteStream;
use aws_sdk_s3::types::{CompletedMultipartUpload, CompletedPart};
use bytes::Bytes;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::super::http::client::{self, About};
use super::super::remote;
use super::super::{BlobWriter, PutMode, PutOutcome};
use super::error::{failed, status_and_code};
use super::{Condition, Core, time};
use crate::error::{Result, StoreError};
use crate::key::Key;

/// Bytes of a part. At least 5 MiB are demanded of all but the last; 10,000 parts are allowed.
const PART: usize = 8 << 20;
/// Objects up to this many bytes go up in one request.
const SINGLE: usize = 16 << 20;
/// The largest object that a server copies in one request, in bytes.
const MAX_COPY: u64 = 5 << 30;
/// Age at which a temporary object is taken for one of a dead process.
const STALE: Duration = Duration::from_secs(24 * 60 * 60);
/// How long a dropped upload may take to be called off.
const ABORT_LIMIT: Duration = Duration::from_secs(10);
const TEMPORARIES: &str = "tmp/";

/// What a conditional request did.
enum Conditional {
    Done,
    /// The object exists already.
    Exists,
}

/// Writes an object of known bytes.
pub(super) async fn put(
    core: &Arc<Core>,
    about: About<'_>,
    key: &str,
    bytes: &[u8],
    mode: PutMode,
) -> Result<PutOutcome> {
    let if_absent = mode == PutMode::IfAbsent;
    // Looking costs less than sending what is there, and a server may not know the condition.
    if if_absent && core.object_size(about, key).await?.is_some() {
        return Ok(PutOutcome::Exists);
    }
    let done = if bytes.len() <= SINGLE {
        put_single(core, about, key, Bytes::copy_from_slice(bytes), if_absent).await?
    } else {
        let mut upload = Multipart::begin(core, about, core.object(key)).await?;
        for piece in bytes.chunks(PART) {
            upload.send(about, Bytes::copy_from_slice(piece)).await?;
        }
        upload.complete(about, if_absent).await?
    };
    Ok(match done {
        Conditional::Done => PutOutcome::Created,
        Conditional::Exists => PutOutcome::Exists,
    })
}

async fn put_single(
    core: &Core,
    about: About<'_>,
    key: &str,
    bytes: Bytes,
    if_absent: bool,
) -> Result<Conditional> {
    conditionally(core, if_absent, async |condition| {
        core.client()
            .await
            .put_object()
            .bucket(&core.address.bucket)
            .key(core.object(key))
            .content_length(i64::try_from(bytes.len()).unwrap_or(i64::MAX))
            .body(ByteStream::from(bytes.clone()))
            .set_if_none_match(condition)
            .send()
            .await
            .map(|_| ())
            .map_err(|e| core.refused(about, &e))
    })
    .await
}

impl Core {
    /// What [`conditionally`] has to know of a failed request.
    fn refused<E>(
        &self,
        about: About<'_>,
        error: &SdkError<E, HttpResponse>,
    ) -> (Option<u16>, StoreError)
    where
        E: ProvideErrorMetadata + std::error::Error + 'static,
    {
        let status = status_and_code(error).0;
        (status, failed(about, error, &self.options.timeouts))
    }
}

/// Makes a request with `If-None-Match: *` if that is wanted and the server takes it, and learns
/// from the answer. `act` answers with the status beside its error.
async fn conditionally(
    core: &Core,
    if_absent: bool,
    act: impl AsyncFn(Option<String>) -> Result<(), (Option<u16>, StoreError)>,
) -> Result<Conditional> {
    let wanted = if_absent && core.condition() != Condition::Refused;
    match act(wanted.then(|| "*".to_owned())).await {
        Ok(()) => Ok(Conditional::Done),
        Err((Some(412), _)) if wanted => {
            core.learn(Condition::Works);
            Ok(Conditional::Exists)
        }
        // A server that does not know it in this request.
        Err((Some(400 | 501), error)) if wanted && core.condition() == Condition::Unknown => {
            tracing::debug!("trying without a condition: {error}");
            act(None).await.map_err(|(_, error)| error)?;
            core.learn(Condition::Refused);
            Ok(Conditional::Done)
        }
        Err((_, error)) => Err(error),
    }
}

/// One part on its way.
struct Part {
    core: Arc<Core>,
    client: Client,
    object: String,
    id: String,
    key: String,
    number: i32,
    bytes: Bytes,
}

impl Part {
    /// Sends it, again if need be. A loop of its own: the future moves between threads.
    async fn send(self) -> Result<CompletedPart> {
        let since = Instant::now();
        let mut failures = 0;
        loop {
            let error = match self.try_send().await {
                Ok(part) => return Ok(part),
                Err(error) => error,
            };
            failures += 1;
            match self.core.options.retry.next(failures, since, &error) {
                Some(wait) => tokio::time::sleep(wait).await,
                None => return Err(error),
            }
        }
    }

    async fn try_send(&self) -> Result<CompletedPart> {
        let about = self.core.about(&self.key, "write");
        let output = self
            .client
            .upload_part()
            .bucket(&self.core.address.bucket)
            .key(&self.object)
            .upload_id(&self.id)
            .part_number(self.number)
            .body(ByteStream::from(self.bytes.clone()))
            .send()
            .await
            .map_err(|e| failed(about, &e, &self.core.options.timeouts))?;
        Ok(CompletedPart::builder()
            .part_number(self.number)
            .set_e_tag(output.e_tag().map(str::to_owned))
            .build())
    }
}

/// An upload in parts. Dropped before its end, it is called off.
struct Multipart {
    core: Arc<Core>,
    client: Client,
    /// Name in the bucket.
    object: String,
    id: String,
    sending: JoinSet<Result<CompletedPart>>,
    permits: Arc<Semaphore>,
    parts: Vec<CompletedPart>,
    next: i32,
    ended: bool,
}

impl Multipart {
    async fn begin(core: &Arc<Core>, about: About<'_>, object: String) -> Result<Self> {
        let policy = core.options.retry;
        let output = policy
            .run(async || {
                core.client()
                    .await
                    .create_multipart_upload()
                    .bucket(&core.address.bucket)
                    .key(&object)
                    .send()
                    .await
                    .map_err(|e| failed(about, &e, &core.options.timeouts))
            })
            .await?;
        let id = output
            .upload_id()
            .ok_or_else(|| client::broken(about, "the server does not name the upload"))?
            .to_owned();
        Ok(Self {
            core: Arc::clone(core),
            client: core.client().await.clone(),
            object,
            id,
            sending: JoinSet::new(),
            permits: Arc::new(Semaphore::new(core.options.max_concurrency.max(1))),
            parts: Vec::new(),
            next: 1,
            ended: false,
        })
    }

    /// Sends a part; waits while as many as allowed are on their way.
    async fn send(&mut self, about: About<'_>, bytes: Bytes) -> Result<()> {
        while let Some(joined) = self.sending.try_join_next() {
            self.parts.push(part_of(about, joined)?);
        }
        let permit = Arc::clone(&self.permits)
            .acquire_owned()
            .await
            .map_err(|e| client::broken(about, e.to_string()))?;
        let number = self.next;
        self.next += 1;
        let part = Part {
            core: Arc::clone(&self.core),
            client: self.client.clone(),
            object: self.object.clone(),
            id: self.id.clone(),
            key: about.key.to_owned(),
            number,
            bytes,
        };
        self.sending.spawn(async move {
            let _permit = permit;
            part.send().await
        });
        Ok(())
    }

    /// Makes an object of the parts.
    async fn complete(mut self, about: About<'_>, if_absent: bool) -> Result<Conditional> {
        while let Some(joined) = self.sending.join_next().await {
            self.parts.push(part_of(about, joined)?);
        }
        self.parts.sort_by_key(CompletedPart::part_number);
        let core = Arc::clone(&self.core);
        let parts = CompletedMultipartUpload::builder()
            .set_parts(Some(self.parts.clone()))
            .build();
        let policy = core.options.retry;
        let mut tried = false;
        let done = policy
            .run(async || {
                let again = std::mem::replace(&mut tried, true);
                let done = conditionally(&core, if_absent, async |condition| {
                    core.client()
                        .await
                        .complete_multipart_upload()
                        .bucket(&core.address.bucket)
                        .key(&self.object)
                        .upload_id(&self.id)
                        .multipart_upload(parts.clone())
                        .set_if_none_match(condition)
                        .send()
                        .await
                        .map(|_| ())
                        .map_err(|e| core.refused(about, &e))
                })
                .await;
                match done {
                    // The answer to an earlier attempt was lost: the upload is no more, the
                    // object is there.
                    Err(_) if again && self.is_complete(about).await? => Ok(Conditional::Done),
                    other => other,
                }
            })
            .await?;
        self.ended = matches!(done, Conditional::Done);
        Ok(done)
    }

    /// Whether the object has as many bytes as the parts: only looked at after an upload that
    /// may have been completed.
    async fn is_complete(&self, about: About<'_>) -> Result<bool> {
        let result = self
            .core
            .client()
            .await
            .head_object()
            .bucket(&self.core.address.bucket)
            .key(&self.object)
            .send()
            .await;
        match result {
            Ok(output) => {
                let name = format!("-{}", self.parts.len());
                // The version of an object made from parts ends with their number.
                Ok(output
                    .e_tag()
                    .is_some_and(|tag| tag.trim_matches('"').ends_with(&name)))
            }
            Err(error) if super::is_absent(&error) => Ok(false),
            Err(error) => Err(failed(about, &error, &self.core.options.timeouts)),
        }
    }
}

impl Drop for Multipart {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        self.sending.abort_all();
        let (client, bucket) = (self.client.clone(), self.core.address.bucket.clone());
        let object = std::mem::take(&mut self.object);
        let id = std::mem::take(&mut self.id);
        finally(async move {
            let aborted = client
                .abort_multipart_upload()
                .bucket(&bucket)
                .key(&object)
                .upload_id(&id)
                .send()
                .await;
            if let Err(error) = aborted {
                tracing::debug!(object, "an upload stays until it is swept: {error}");
            }
        });
    }
}

/// Runs a last request from a destructor, which may neither fail nor hang.
fn finally(future: impl Future<Output = ()> + Send + 'static) {
    let Ok(runtime) = remote::runtime() else {
        return;
    };
    let (done, wait) = mpsc::channel();
    runtime.spawn(async move {
        future.await;
        let _ = done.send(()); // nobody waits any more: late, but done
    });
    let _ = wait.recv_timeout(ABORT_LIMIT); // swept later
}

fn part_of(
    about: About<'_>,
    joined: Result<Result<CompletedPart>, tokio::task::JoinError>,
) -> Result<CompletedPart> {
    joined.map_err(|e| client::broken(about, e.to_string()))?
}

/// An object that is being written and has no name yet.
pub(super) struct S3Writer {
    core: Arc<Core>,
    buffer: Vec<u8>,
    size: u64,
    upload: Option<(Multipart, String)>,
}

impl S3Writer {
    pub(super) fn new(core: Arc<Core>) -> Self {
        Self {
            core,
            buffer: Vec::new(),
            size: 0,
            upload: None,
        }
    }

    /// Sends what the buffer holds as a part.
    fn send(&mut self) -> Result<()> {
        let core = Arc::clone(&self.core);
        let about = core.about("a new object", "write");
        let bytes = Bytes::from(std::mem::take(&mut self.buffer));
        let upload = self.upload.take();
        let sent = core.run(about, async {
            let (mut upload, name) = match upload {
                Some(upload) => upload,
                None => {
                    sweep_once(&core, about).await;
                    let name = format!(
                        "{TEMPORARIES}{}-{:016x}",
                        std::process::id(),
                        fastrand::u64(..)
                    );
                    let upload = Multipart::begin(&core, about, core.object(&name)).await?;
                    (upload, name)
                }
            };
            upload.send(about, bytes).await?;
            Ok((upload, name))
        })?;
        self.upload = Some(sent);
        Ok(())
    }
}

impl BlobWriter for S3Writer {
    fn write(&mut self, mut bytes: &[u8]) -> Result<()> {
        self.size += bytes.len() as u64;
        while !bytes.is_empty() {
            let room = PART - self.buffer.len();
            let (now, later) = bytes.split_at_checked(room).unwrap_or((bytes, &[]));
            self.buffer.extend_from_slice(now);
            bytes = later;
            if self.buffer.len() >= PART {
                self.send()?;
            }
        }
        Ok(())
    }

    fn commit(mut self: Box<Self>, key: &Key, mode: PutMode) -> Result<PutOutcome> {
        let core = Arc::clone(&self.core);
        let about = core.about(key.as_str(), "write");
        let if_absent = mode == PutMode::IfAbsent;
        let policy = core.options.retry;
        if self.upload.is_none() {
            return core.run(
                about,
                policy.run(async || put(&core, about, key.as_str(), &self.buffer, mode).await),
            );
        }
        if self.size > MAX_COPY {
            return Err(StoreError::InvalidInput {
                object: key.to_string(),
                what: format!(
                    "it has {} bytes, at most {MAX_COPY} can be streamed",
                    self.size
                ),
            });
        }
        if if_absent {
            let there = core.run(
                about,
                policy.run(async || core.object_size(about, key.as_str()).await),
            )?;
            if there.is_some() {
                return Ok(PutOutcome::Exists);
            }
        }
        if !self.buffer.is_empty() {
            self.send()?;
        }
        let Some((upload, name)) = self.upload.take() else {
            return Err(client::broken(about, "the upload is gone"));
        };
        core.run(about, async {
            upload.complete(about, false).await?;
            let copied = copy(&core, about, &name, key.as_str(), if_absent).await;
            let deleted = policy
                .run(async || core.delete_object(about, &name).await)
                .await;
            if let Err(error) = deleted {
                tracing::debug!("a temporary object stays until it is swept: {error}");
            }
            Ok(match copied? {
                Conditional::Done => PutOutcome::Created,
                Conditional::Exists => PutOutcome::Exists,
            })
        })
    }
}

/// Copies an object of the store within its bucket.
async fn copy(
    core: &Core,
    about: About<'_>,
    from: &str,
    to: &str,
    if_absent: bool,
) -> Result<Conditional> {
    let policy = core.options.retry;
    policy
        .run(async || {
            conditionally(core, if_absent, async |condition| {
                core.client()
                    .await
                    .copy_object()
                    .bucket(&core.address.bucket)
                    // Neither bucket nor prefix nor key has anything to escape.
                    .copy_source(format!("{}/{}", core.address.bucket, core.object(from)))
                    .key(core.object(to))
                    .set_if_none_match(condition)
                    .send()
                    .await
                    .map(|_| ())
                    .map_err(|e| core.refused(about, &e))
            })
            .await
        })
        .await
}

/// Removes what dead processes left, once per store and process. Best effort: what stays is found
/// next time. Requests are only accepted from clocks that are right to minutes, so ours will do.
async fn sweep_once(core: &Core, about: About<'_>) {
    if core.swept.swap(true, Ordering::Relaxed) {
        return;
    }
    if let Err(error) = sweep(core, about).await {
        tracing::debug!("cannot look for what dead processes left: {error}");
    }
}

async fn sweep(core: &Core, about: About<'_>) -> Result<()> {
    let is_stale = |then: Option<SystemTime>| {
        then.and_then(|then| SystemTime::now().duration_since(then).ok())
            .is_some_and(|age| age > STALE)
    };
    for (name, listed) in core.list_all(about, TEMPORARIES).await? {
        if is_stale(listed.modified) {
            core.delete_object(about, &name).await?;
            tracing::debug!(name, "removed a stale temporary");
        }
    }
    let client = core.client().await;
    let uploads = client
        .list_multipart_uploads()
        .bucket(&core.address.bucket)
        .prefix(core.object(TEMPORARIES))
        .send()
        .await
        .map_err(|e| failed(about, &e, &core.options.timeouts))?;
    for upload in uploads.uploads() {
        let begun = upload.initiated().and_then(|t| time(t.secs()));
        if let (true, Some(key), Some(id)) = (is_stale(begun), upload.key(), upload.upload_id()) {
            client
                .abort_multipart_upload()
                .bucket(&core.address.bucket)
                .key(key)
                .upload_id(id)
                .send()
                .await
                .map_err(|e| failed(about, &e, &core.options.timeouts))?;
            tracing::debug!(key, "called off a stale upload");
        }
    }
    Ok(())
}
