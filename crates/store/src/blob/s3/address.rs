//! `s3://BUCKET/PREFIX?endpoint=URL&region=NAME&path_style=BOOL&profile=NAME&anonymous=BOOL`.

use std::fmt::Write as _;

use reqwest::Url;

use super::super::open::redacted;
use crate::error::{Result, StoreError};

/// A bucket, a prefix in it, and where that bucket is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) bucket: String,
    /// Empty, or ends with `/`.
    pub(crate) prefix: String,
    /// `None`: what the environment and the profile say, else Amazon's.
    pub(crate) endpoint: Option<String>,
    pub(crate) region: Option<String>,
    /// `None`: as the endpoint needs it, see [`super::connect`].
    pub(crate) path_style: Option<bool>,
    pub(crate) profile: Option<String>,
    /// Requests are not signed: a bucket that anyone may read.
    pub(crate) anonymous: bool,
}

impl Address {
    /// Takes an address apart. `settings` are the query's fields that are left for this scheme.
    pub(crate) fn new(url: &Url, settings: &[(String, String)]) -> Result<Self> {
        let invalid = |why: String| StoreError::InvalidUrl {
            url: redacted(url.as_str().split('?').next().unwrap_or("")),
            why,
        };
        if !url.username().is_empty() || url.password().is_some() || url.port().is_some() {
            return Err(invalid(
                "the address is s3://BUCKET/PREFIX; credentials come from the environment or a profile, a server from endpoint=URL".to_owned(),
            ));
        }
        let bucket = url.host_str().unwrap_or("").to_owned();
        let name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
        if bucket.is_empty() || bucket.len() > 255 || !bucket.bytes().all(name) {
            return Err(invalid(
                "the address is s3://BUCKET/PREFIX, and a bucket's name consists of letters, digits, '.', '-' and '_'".to_owned(),
            ));
        }
        let path = url.path().trim_matches('/');
        let segment =
            |part: &str| !part.is_empty() && part != "." && part != ".." && part.bytes().all(name);
        if path.len() > 400 || !(path.is_empty() || path.split('/').all(segment)) {
            return Err(invalid(
                "the prefix consists of letters, digits, '.', '-', '_' and single '/'".to_owned(),
            ));
        }
        let mut address = Self {
            bucket,
            prefix: if path.is_empty() {
                String::new()
            } else {
                format!("{path}/")
            },
            endpoint: None,
            region: None,
            path_style: None,
            profile: None,
            anonymous: false,
        };
        for (field, value) in settings {
            let flag = || {
                value
                    .parse::<bool>()
                    .map_err(|_| invalid(format!("{field} is true or false, not {value:?}")))
            };
            match field.as_str() {
                "endpoint" => {
                    let sound = Url::parse(value).is_ok_and(|url| {
                        matches!(url.scheme(), "http" | "https")
                            && url.host_str().is_some()
                            && url.username().is_empty()
                            && url.password().is_none()
                    });
                    if !sound {
                        return Err(invalid(format!(
                            "endpoint is http(s)://HOST[:PORT], not {:?}",
                            redacted(value)
                        )));
                    }
                    address.endpoint = Some(value.trim_end_matches('/').to_owned());
                }
                "region" => address.region = Some(value.clone()),
                "profile" => address.profile = Some(value.clone()),
                "path_style" => address.path_style = Some(flag()?),
                "anonymous" => address.anonymous = flag()?,
                other => {
                    return Err(invalid(format!(
                        "there is no setting {other:?}; an s3:// address takes endpoint, region, path_style, profile, anonymous, and {}",
                        super::super::open::SETTINGS
                    )));
                }
            }
        }
        Ok(address)
    }

    /// The address in one spelling, which opens the same store again.
    pub(crate) fn url(&self) -> String {
        let mut url = format!("s3://{}/{}", self.bucket, self.prefix);
        url.truncate(url.trim_end_matches('/').len());
        let mut separator = '?';
        let mut add = |field: &str, value: &str| {
            // Writing into a string cannot fail.
            let _ = write!(url, "{separator}{field}={}", escape(value));
            separator = '&';
        };
        if let Some(endpoint) = &self.endpoint {
            add("endpoint", endpoint);
        }
        if let Some(region) = &self.region {
            add("region", region);
        }
        if let Some(path_style) = self.path_style {
            add("path_style", &path_style.to_string());
        }
        if let Some(profile) = &self.profile {
            add("profile", profile);
        }
        if self.anonymous {
            add("anonymous", "true");
        }
        url
    }
}

/// Escapes what would end a field of a query, or several addresses in a row.
fn escape(text: &str) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~:/[]@".contains(&byte) {
            out.push(char::from(byte));
        } else {
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Address> {
        let url = Url::parse(text).unwrap();
        let settings: Vec<_> = url
            .query_pairs()
            .map(|(k, v)| (k.into_owned(), v.into_owned()))
            .collect();
        Address::new(&url, &settings)
    }

    #[test]
    fn addresses_come_back_as_they_went() {
        for text in [
            "s3://bucket",
            "s3://bucket/a/b.c",
            "s3://b.u_c-k/x?endpoint=http://[::1]:9000&region=garage&path_style=false",
            "s3://bucket?profile=a%20b%2Cc%26d&anonymous=true",
        ] {
            let address = parse(text).unwrap();
            assert_eq!(address.url(), text);
            assert_eq!(parse(&address.url()).unwrap(), address);
        }
        let address = parse("s3://Bucket//a/?endpoint=https://h:1/").unwrap();
        assert_eq!((&*address.bucket, &*address.prefix), ("Bucket", "a/"));
        assert_eq!(address.endpoint.as_deref(), Some("https://h:1"));
    }

    #[test]
    fn what_is_no_address_says_why() {
        for (text, why) in [
            ("s3:///x", "BUCKET"),
            ("s3://u:p@bucket/x", "credentials"),
            ("s3://bucket:90/x", "endpoint"),
            ("s3://bucket/a//b", "prefix"),
            ("s3://bucket/a%20b", "prefix"),
            ("s3://bucket?endpoint=host:90", "endpoint"),
            ("s3://bucket?endpoint=http://u:p@host", "endpoint"),
            ("s3://bucket?path_style=yes", "true or false"),
            ("s3://bucket?colour=red", "colour"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
            assert!(!error.contains("u:p@"), "{error}");
        }
    }
}
