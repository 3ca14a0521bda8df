//! The SDK's client: Amazon's whole chain of credentials (environment, profiles, web identity,
//! processes, containers, instances), any compatible endpoint.
//!
//! Checksums are sent and checked only where an operation demands them: compatible servers stumble
//! over them, and what is read is verified by its digest anyway. The SDK's own retries are off:
//! ours see the whole of an operation, with its body. Its protection against uploads that stall is
//! on.

use aws_config::BehaviorVersion;
use aws_config::meta::region::RegionProviderChain;
use aws_config::retry::RetryConfig;
use aws_config::stalled_stream_protection::StalledStreamProtectionConfig;
use aws_config::timeout::TimeoutConfig;
use aws_sdk_s3::Client;
use aws_sdk_s3::config::{
    Builder, Credentials, Region, RequestChecksumCalculation, ResponseChecksumValidation,
};

use super::super::open::OpenOptions;
use super::address::Address;

/// What servers that have no regions expect.
const DEFAULT_REGION: &str = "us-east-1";

/// Makes a client. Reads the environment and the AWS profiles, as the SDK does; asks no server.
pub(crate) async fn connect(address: &Address, options: &OpenOptions) -> Client {
    let timeouts = &options.timeouts;
    let region = RegionProviderChain::first_try(address.region.clone().map(Region::new))
        .or_default_provider()
        .or_else(DEFAULT_REGION);
    let mut loader = aws_config::defaults(BehaviorVersion::latest())
        .region(region)
        .retry_config(RetryConfig::disabled())
        .timeout_config(
            TimeoutConfig::builder()
                .connect_timeout(timeouts.connect)
                .operation_attempt_timeout(timeouts.operation)
                .build(),
        )
        .stalled_stream_protection(
            StalledStreamProtectionConfig::enabled()
                .grace_period(timeouts.idle)
                .build(),
        );
    if let Some(profile) = &address.profile {
        loader = loader.profile_name(profile);
    }
    if let Some(endpoint) = &address.endpoint {
        loader = loader.endpoint_url(endpoint);
    }
    if address.anonymous {
        loader = loader.no_credentials();
    } else if let Some(user) = &options.s3_credentials {
        loader = loader.credentials_provider(Credentials::new(
            &user.access_key,
            &user.secret_key,
            user.session_token.clone(),
            None,
            "layerpack",
        ));
    }
    let shared = loader.load().await;
    // A name of a host for each bucket is Amazon's; others seldom have it.
    let path_style = address
        .path_style
        .unwrap_or_else(|| shared.endpoint_url().is_some());
    let config = Builder::from(&shared)
        .force_path_style(path_style)
        .request_checksum_calculation(RequestChecksumCalculation::WhenRequired)
        .response_checksum_validation(ResponseChecksumValidation::WhenRequired)
        .build();
    Client::from_conf(config)
}
