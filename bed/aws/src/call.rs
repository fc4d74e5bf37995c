//! Parses requests of SDK clients, and builds each service's error responses.

use axum::{
    body::Bytes,
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::{errors, form::Form, sqs, xml};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Service {
    DynamoDb,
    Ec2,
    Sqs,
}

/// One request of an SDK client.
pub struct Call {
    pub service: Service,
    pub action: String,
    pub path: String,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Service {
    pub fn name(self) -> &'static str {
        match self {
            Self::DynamoDb => "dynamodb",
            Self::Ec2 => "ec2",
            Self::Sqs => "sqs",
        }
    }
}

impl Call {
    /// Determines service and action. The JSON protocols name both in `X-Amz-Target`; EC2 has the action in its form.
    pub fn read(path: &str, headers: HeaderMap, body: Bytes) -> Option<Self> {
        let target = headers.get("x-amz-target").and_then(|value| value.to_str().ok());
        let (service, action) = match target.and_then(|target| target.split_once('.')) {
            Some(("DynamoDB_20120810", action)) => (Service::DynamoDb, action.to_owned()),
            Some(("AmazonSQS", action)) => (Service::Sqs, action.to_owned()),
            Some(_) => return None,
            None => (Service::Ec2, Form::parse(&body).get("Action")?.to_owned()),
        };
        Some(Self { service, action, path: path.to_owned(), headers, body })
    }

    pub fn form(&self) -> Form {
        Form::parse(&self.body)
    }

    /// The decoded body, for rules that match text.
    pub fn text(&self) -> String {
        match self.service {
            Service::Ec2 => self.form().to_string(),
            _ => String::from_utf8_lossy(&self.body).into_owned(),
        }
    }
}

/// A response of an emulator, or one made up instead of it.
#[derive(Clone, Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Answer {
    pub fn new(status: u16, content_type: &'static str, body: impl Into<Bytes>) -> Self {
        let headers = HeaderMap::from_iter([(header::CONTENT_TYPE, HeaderValue::from_static(content_type))]);
        Self { status: StatusCode::from_u16(status).unwrap_or(StatusCode::BAD_GATEWAY), headers, body: body.into() }
    }

    pub fn json(value: &serde_json::Value) -> Self {
        Self::new(200, "application/x-amz-json-1.0", value.to_string())
    }

    pub fn xml(body: String) -> Self {
        Self::new(200, "text/xml;charset=UTF-8", body)
    }

    /// An error in the service's own format; the status defaults to that in the table of [`errors`].
    pub fn error(service: Service, code: &str, message: &str, status: Option<u16>) -> Self {
        let status = status.unwrap_or_else(|| errors::status_of(service, code));
        if service == Service::Ec2 {
            let error = xml::element("Code", code) + &xml::element("Message", message);
            let errors = format!("<Errors><Error>{error}</Error></Errors><RequestID>bed</RequestID>");
            return Self::new(
                status,
                "text/xml;charset=UTF-8",
                format!("{}<Response>{errors}</Response>", xml::PROLOG),
            );
        }
        let namespace = if service == Service::Sqs { "com.amazonaws.sqs" } else { "com.amazonaws.dynamodb.v20120810" };
        let body = json!({ "__type": format!("{namespace}#{code}"), "message": message });
        let mut answer = Self::new(status, "application/x-amz-json-1.0", body.to_string());
        if service == Service::Sqs {
            answer.headers.extend(sqs::query_error(code, status));
        }
        answer
    }

    /// Each service's throttling error for this action. DynamoDB has another one for calls about tables.
    pub fn throttled(service: Service, action: &str) -> Self {
        const NO_THROUGHPUT: &str = "ProvisionedThroughputExceededException";
        let (code, message) = match service {
            Service::DynamoDb if errors::row_of(service, Some(action), NO_THROUGHPUT).is_some() => {
                (NO_THROUGHPUT, "The level of configured provisioned throughput for the table was exceeded.")
            }
            Service::DynamoDb => ("ThrottlingException", "Rate of requests exceeds the allowed throughput."),
            Service::Ec2 => ("RequestLimitExceeded", "Request limit exceeded."),
            Service::Sqs => ("RequestThrottled", "The request was denied due to request throttling."),
        };
        Self::error(service, code, message, None)
    }

    /// Each service's internal error.
    pub fn broken(service: Service, status: u16) -> Self {
        let code = match (service, status) {
            (Service::Ec2, 503) => "Unavailable",
            (Service::DynamoDb | Service::Sqs, 503) => "ServiceUnavailable",
            (Service::DynamoDb, _) => "InternalServerError",
            _ => "InternalError",
        };
        Self::error(service, code, "An internal error has occurred.", Some(status))
    }

    pub fn ok(&self) -> bool {
        self.status.is_success()
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

impl IntoResponse for Answer {
    fn into_response(self) -> Response {
        (self.status, self.headers, self.body).into_response()
    }
}
