"""TensorBoard's messages, which tensorboardX makes at import, unseen by type checkers."""
# pyright: reportAttributeAccessIssue=false

from typing import Any

from tensorboardX.proto import (
    api_pb2,
    event_pb2,
    layout_pb2,
    plugin_hparams_pb2,
    summary_pb2,
    tensor_pb2,
    tensor_shape_pb2,
)

Category: Any = layout_pb2.Category
Chart: Any = layout_pb2.Chart
Event: Any = event_pb2.Event
HParamsPluginData: Any = plugin_hparams_pb2.HParamsPluginData
Layout: Any = layout_pb2.Layout
MarginChartContent: Any = layout_pb2.MarginChartContent
MultilineChartContent: Any = layout_pb2.MultilineChartContent
SessionEndInfo: Any = plugin_hparams_pb2.SessionEndInfo
SessionLog: Any = event_pb2.SessionLog
Status: Any = api_pb2.Status
Summary: Any = summary_pb2.Summary
SummaryMetadata: Any = summary_pb2.SummaryMetadata
TensorProto: Any = tensor_pb2.TensorProto
TensorShapeProto: Any = tensor_shape_pb2.TensorShapeProto
