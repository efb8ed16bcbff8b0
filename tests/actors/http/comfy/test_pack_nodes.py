"""Custom nodes of texts, numbers and switches give what their descriptions say: each has a case, and each of its inputs
changes a result, is refused, or is listed with a reason."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from modelpool.actors.http.comfy.comfy_evaluation import evaluated
from modelpool.actors.http.comfy.comfy_graph import KnownGraph, PoolNames, nodes_in_order
from modelpool.actors.http.comfy.comfy_node_types import ANY, NodeInput, NodeType, NodeUnsupported
from modelpool.actors.http.comfy.comfy_nodes import NODE_TYPES
from modelpool.actors.http.comfy.comfy_pack_numbers import PACK_NUMBERS
from modelpool.actors.http.comfy.comfy_pack_switches import PACK_SWITCHES
from modelpool.actors.http.comfy.comfy_pack_texts import PACK_TEXTS
from modelpool.actors.http.comfy.comfy_values import BlankLatent
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from tests.actors.http.comfy.comfy_examples import Graph, basic, node

NAMES = PoolNames({"shapes": "Stable Diffusion 1"}, ["light"])
#: a kind of node, its inputs, and its outputs
Case = tuple[str, Mapping[str, Any], tuple[Any, ...]]
_THREE = {"text1": "a", "text2": "b", "text3": "c"}
_FINDS = {"find1": "cat", "replace1": "dog", "find2": "dog", "replace2": "fox", "find3": "red", "replace3": "old"}
_LATENT = BlankLatent(896, 1152, 2)
TEXT_CASES: tuple[Case, ...] = (
    ("JoinStrings", {"delimiter": "-", "string1": "a", "string2": ""}, ("a-",)),
    (
        "JoinStringMulti",
        {"inputcount": 3, "delimiter": "+", "return_list": False, "string_1": "a", "string_2": "", "string_3": "c"},
        ("a+c",),
    ),
    ("SomethingToString", {"input": 7, "prefix": "<", "suffix": ">"}, ("<7>",)),
    ("Text to String", {"text": "a"}, ("a",)),
    ("String to Text", {"string": "a"}, ("a",)),
    ("CR Text", {"text": "a"}, ("a", "")),
    ("CR Multiline Text", {"text": "a"}, ("a", "")),
    ("CR Prompt Text", {"prompt": "a"}, ("a", "")),
    ("CR Integer To String", {"int_": 7}, ("7", "")),
    ("CR Float To String", {"float_": 1.5}, ("1.5", "")),
    ("CR Combine Prompt", {"part1": "a", "part2": "", "part3": "c", "part4": "d", "separator": "|"}, ("a||c|d", "")),
    ("CR Combine Prompt", {"part1": "a", "part2": "b"}, ("a,b,,", "")),
    ("CR Text Concatenate", {"text1": "a", "text2": "b", "separator": "/"}, ("a/b", "")),
    ("CR Text Replace", {"text": "a red cat", **_FINDS}, ("a old fox", "")),
    ("CR Text Operation", {"text": "aB c ", "operation": "invert_case"}, ("Ab C ", "")),
    ("CR Text Operation", {"text": "aB c ", "operation": "reverse"}, (" c Ba", "")),
    ("CR Text Operation", {"text": "aB c ", "operation": "remove_spaces"}, ("aBc", "")),
    ("CR Text Length", {"text": "abc"}, (3, "")),
    ("easy positive", {"positive": "a"}, ("a",)),
    ("easy negative", {"negative": "a"}, ("a",)),
    ("easy promptConcat", {"prompt1": "a", "prompt2": "b", "separator": ", "}, ("a, b",)),
    ("easy promptReplace", {"prompt": "a red cat", **_FINDS}, ("a old fox",)),
    ("LayerUtility: String", {"string": "a"}, ("a",)),
    ("LayerUtility: TextBox", {"text": "a"}, ("a",)),
    ("LayerUtility: TextJoin", {"text_1": "a", "text_2": "b", "text_3": "c", "text_4": "d"}, ("abcd",)),
    ("LayerUtility: StringCondition", {"text": "a cat", "condition": "include", "sub_string": "cat"}, (True, "a cat")),
    ("LayerUtility: StringCondition", {"text": "a cat", "condition": "exclude", "sub_string": "cat"}, (False, "a cat")),
    ("ttN text", {"text": "a"}, ("a",)),
    ("ttN concat", {**_THREE, "text2": "", "delimiter": "\\n"}, ("a\nc",)),
    ("ttN concat", {**_THREE, "delimiter": "-"}, ("a-b-c",)),
    ("ttN text3BOX_3WAYconcat", {**_THREE, "delimiter": "-"}, ("a", "b", "c", "a-b", "a-c", "b-c", "a-b-c")),
    ("String Replace (mtb)", {"string": "a.b", "old": ".", "new": "-", "use_regex": False}, ("a-b",)),
    ("String Replace (mtb)", {"string": "a.b", "old": ".*", "new": "x", "use_regex": True}, ("xx",)),
    ("StringFunction|pysssss", {"action": "append", "tidy_tags": "no", "text_a": "a ", "text_b": " ,b", "text_c": "c"},
     ("a  ,bc",)),
    ("StringFunction|pysssss", {"action": "append", "tidy_tags": "yes", "text_a": "a ", "text_b": " ,b", "text_c": "c"},
     ("a,b, c",)),
    ("StringFunction|pysssss", {"action": "replace", "tidy_tags": "no", "text_a": "cat", "text_b": "/[ct]/",
                                "text_c": "-"}, ("-a-",)),
    ("RemoveDuplicateTags|LP", {"text": "a, b,a , ,c"}, ("a, b, c",)),
    ("DF_Text", {"Text": "a"}, ("a",)),
    ("DF_Text_Box", {"Text": "a"}, ("a",)),
    ("Textbox", {"text": "a"}, ("a",)),
    ("Textbox", {"text": "a", "passthrough": "b"}, ("b",)),
    ("String", {"String": "a"}, ("a",)),
    ("String-\U0001f52c", {"String": "a"}, ("a",)),
    ("easy wildcards", {"text": "a red fox", "seed": 3}, ("a red fox", "a red fox")),
    ("easy wildcards", {"text": "a fox\na hare", "seed": 3}, ("a fox\na hare", "a fox\na hare")),
    ("Text box", {"text": "a"}, ("a",)),
    ("PromptBuilder //Inspire", {"category": "Artists", "preset": "#PRESET", "text": "a"}, ("a",)),
    ("PreviewTextNode", {"text": "a"}, ("a",)),
    ("DisplayText_Zho", {"text": "a"}, ("a",)),
    ("ttN textDebug", {"print_to_console": True, "console_title": "t", "execute": "Always", "text": "a"}, ("a",)),
    ("Boolean To Text", {"boolean": False}, ("False",)),
    ("easy loraNames", {"lora_name": "light"}, ("light",)),
    ("floatToText _O", {"float": 1.5}, ("1.5",)),
    ("Concat Text _O", {"text1": "a", "text2": "b", "separator": ", "}, ("a, b",)),
    ("Primitive string [Crystools]", {"string": "a"}, ("a",)),
    ("Primitive string multiline [Crystools]", {"string": "a"}, ("a",)),
    ("SDXLPromptStyler", {"text_positive": "a", "text_negative": "b", "style": "base", "log_prompt": "No"}, ("a", "b")),
    ("ImpactStringSelector", {"strings": "a\nb\nc", "multiline": False, "select": 4}, ("b",)),
    ("ImpactStringSelector", {"strings": "#a\nb\n#c", "multiline": True, "select": 0}, ("a\nb",)),
    ("ImpactWildcardProcessor", {"wildcard_text": "a {red|blue} cat", "populated_text": "a red cat", "mode": "fixed",
                                 "seed": 3}, ("a red cat",)),
    ("ImpactWildcardProcessor", {"wildcard_text": "a cat", "populated_text": "", "mode": "populate", "seed": 3},
     ("a cat",)),
)  # fmt: skip
_RATIO = {"width": 512, "height": 640, "upscale_factor": 1.5, "batch_size": 2}
_PORTRAIT = {**_RATIO, "aspect_ratio": "3:4 portrait 896x1152"}
NUMBER_CASES: tuple[Case, ...] = (
    ("ImpactInt", {"value": 3}, (3,)),
    ("ImpactFloat", {"value": 1.5}, (1.5,)),
    ("ImpactBoolean", {"value": True}, (True,)),
    ("ImpactCompare", {"cmp": "a > b", "a": 2, "b": 2}, (False,)),
    ("ImpactCompare", {"cmp": "a <> b", "a": 2, "b": 1}, (True,)),
    ("ImpactCompare", {"cmp": "a = b", "a": 2, "b": 2}, (True,)),
    ("ImpactLogicalOperators", {"operator": "xor", "bool_a": True, "bool_b": True}, (False,)),
    ("ImpactLogicalOperators", {"operator": "and", "bool_a": True, "bool_b": False}, (False,)),
    ("ImpactNeg", {"value": True}, (False,)),
    ("ImpactMinMax", {"mode": True, "a": 2, "b": 3}, (3,)),
    ("ImpactMinMax", {"mode": False, "a": 2, "b": 3}, (2,)),
    ("easy seed", {"seed": 5}, (5,)),
    ("easy mathInt", {"a": -7, "b": 2, "operation": "divide"}, (-4,)),
    ("easy mathInt", {"a": 7, "b": 2, "operation": "power"}, (49,)),
    ("easy mathFloat", {"a": 7.0, "b": 2.0, "operation": "divide"}, (3.5,)),
    ("easy compare", {"a": 1, "b": 2, "comparison": "a <= b"}, (True,)),
    ("easy compare", {"a": "x", "b": "x", "comparison": "a == b"}, (True,)),
    ("easy simpleMath", {"value": "ceil(a * 8) + b - c", "a": 1.2, "b": 1, "c": 2}, (9, 9.0, True)),
    ("SimpleMathInt+", {"value": 3}, (3,)),
    ("SimpleMathFloat+", {"value": 1.5}, (1.5,)),
    ("SimpleMathBoolean+", {"value": True}, (True, 1)),
    ("SimpleComparison+", {"a": 1, "b": 2, "comparison": ">"}, (False,)),
    ("BOOLConstant", {"value": True}, (True,)),
    ("SimpleCalculatorKJ", {"expression": "a * b + c", "variables.a": 2, "variables.b": 1.5, "variables.c": 1},
     (4.0, 4, True)),
    ("SimpleCalculatorKJ", {"expression": "a - b", "a": 2, "b": 2}, (0.0, 0, False)),
    ("FL_FloatToInt", {"float_value": 1.5, "rounding_method": "floor"}, (1,)),
    ("FL_FloatToInt", {"float_value": 1.2, "rounding_method": "ceil"}, (2,)),
    ("JWIntegerToFloat", {"value": 3}, (3.0,)),
    ("JWIntegerToString", {"value": 3}, ("3",)),
    ("JWFloatToString", {"value": 1.5}, ("1.5",)),
    ("JWStringToInteger", {"text": "12"}, (12,)),
    ("JWStringToFloat", {"text": "1.5"}, (1.5,)),
    ("JWFloatToInteger", {"value": 1.2, "mode": "ceiling"}, (2,)),
    *(
        (f"JWInteger{name}", {"a": 7, "b": 2}, (found,))
        for name, found in (("Add", 9), ("Sub", 5), ("Mul", 14), ("Div", 3.5), ("Max", 7), ("Min", 2))
    ),
    *(
        (f"JWFloat{name}", {"a": 7.0, "b": 2.0}, (found,))
        for name, found in (("Add", 9.0), ("Sub", 5.0), ("Mul", 14.0), ("Div", 3.5), ("Max", 7.0), ("Min", 2.0))
    ),
    ("CM_FloatToInt", {"a": 1.9}, (1,)),
    ("CM_IntToFloat", {"a": 1}, (1.0,)),
    ("CM_IntBinaryOperation", {"op": "Div", "a": 7, "b": 2}, (3,)),
    ("CM_FloatBinaryOperation", {"op": "Div", "a": 7.0, "b": 2.0}, (3.5,)),
    ("CM_FloatBinaryOperation", {"op": "FloorDiv", "a": 7.0, "b": 2.0}, (3.0,)),
    ("CM_IntToNumber", {"a": 3}, (3,)),
    ("CM_FloatToNumber", {"a": 1.5}, (1.5,)),
    ("CM_NumberToInt", {"a": 1.9}, (1,)),
    ("CM_NumberToFloat", {"a": 3}, (3.0,)),
    ("CM_NumberBinaryOperation", {"op": "Mul", "a": 3, "b": 1.5}, (4.5,)),
    ("CM_NumberBinaryOperation", {"op": "Div", "a": 3, "b": 2}, (1.5,)),
    ("CM_IntUnaryOperation", {"op": "Not", "a": 3}, (-4,)),
    ("CM_IntUnaryOperation", {"op": "Cube", "a": -2}, (-8,)),
    ("CM_FloatUnaryOperation", {"op": "Degrees", "a": math.pi}, (180.0,)),
    ("CM_FloatUnaryOperation", {"op": "Round", "a": 2.6}, (3.0,)),
    ("CM_FloatUnaryOperation", {"op": "Log2", "a": 8.0}, (3.0,)),
    ("CM_IntBinaryCondition", {"op": "Geq", "a": 3, "b": 3}, (True,)),
    ("CM_FloatBinaryCondition", {"op": "Neq", "a": 3.0, "b": 3.0}, (False,)),
    ("CM_NumberBinaryCondition", {"op": "Lt", "a": 2, "b": 3.5}, (True,)),
    ("CM_IntUnaryCondition", {"op": "IsOdd", "a": -3}, (True,)),
    ("CM_FloatUnaryCondition", {"op": "IsNegative", "a": -0.5}, (True,)),
    ("CM_NumberUnaryCondition", {"op": "IsNonZero", "a": 0}, (False,)),
    ("CM_BoolUnaryOperation", {"op": "Not", "a": True}, (False,)),
    *(
        ("CM_BoolBinaryOperation", {"op": name, "a": True, "b": False}, (found,))
        for name, found in (("Nor", False), ("Xor", True), ("Nand", True), ("And", False), ("Xnor", False),
                            ("Or", True), ("Eq", False), ("Neq", True))
    ),
    ("CM_BoolToInt", {"a": True}, (1,)),
    ("CM_IntToBool", {"a": -1}, (True,)),
    ("CM_IntToBool", {"a": 0}, (False,)),
    ("Integer", {"Value": 3}, (3,)),
    ("Int to float", {"Value": 3}, (3.0,)),
    ("Sum", {"Value_A": 3.0, "Value_B": 2.0}, (5.0,)),
    ("Subtract", {"Value_A": 3.0, "Value_B": 2.0}, (1.0,)),
    ("Multiply", {"Value_A": 3.0, "Value_B": 2.0}, (6.0,)),
    ("Divide", {"Value_A": 3.0, "Value_B": 2.0}, (1.5,)),
    ("CR String To Number", {"text": "2.6", "round_integer": "round down"}, (2, 2.6, "")),
    ("CR String To Number", {"text": "2.2", "round_integer": "round up"}, (3, 2.2, "")),
    ("Number Input Switch", {"number_a": 7, "number_b": 2.5, "boolean_number": 1}, (7, 7.0, 7)),
    ("Number Input Switch", {"number_a": 7, "number_b": 2.5, "boolean_number": 0}, (2.5, 2.5, 2)),
    ("Number Input Condition",
     {"number_a": 7, "number_b": 2.5, "return_boolean": "true", "comparison": "greater-than"}, (1, 1.0, 1)),
    ("Number Input Condition",
     {"number_a": 7, "number_b": 2.5, "return_boolean": "false", "comparison": "less-than"}, (2.5, 2.5, 2)),
    ("Debug Number to Console", {"number": 7, "label": "x"}, (7,)),
    ("CM_NumberUnaryOperation", {"op": "Neg", "a": 3}, (-3,)),
    ("CM_NumberUnaryOperation", {"op": "Cos", "a": 0.0}, (1.0,)),
    ("SeargeIntegerMath", {"op": "a * b + c", "a": 2, "b": 3, "c": 4}, (10,)),
    ("SeargeIntegerMath", {"op": "a - c", "a": 2, "b": 3, "c": 4}, (-2,)),
    ("floatToInt _O", {"float": 1.9}, (1,)),
    ("AspectSize", {"model_type": "SD", "aspect_ratio_width": 1, "aspect_ratio_height": 1}, (512, 512)),
    ("AspectSize", {"model_type": "SDXL", "aspect_ratio_width": 4, "aspect_ratio_height": 1}, (2048, 512)),
    ("mxSeed", {"seed": 5}, (5,)),
    ("mxSlider", {"Xi": 3, "Xf": 2.5, "isfloatX": 0}, (3,)),
    ("mxSlider", {"Xi": 3, "Xf": 2.5, "isfloatX": 1}, (2.5,)),
    ("mxSlider2D", {"Xi": 3, "Xf": 2.5, "Yi": 4, "Yf": 0.5, "isfloatX": 0, "isfloatY": 1}, (3, 0.5)),
    ("mxSlider2D", {"Xi": 3, "Xf": 2.5, "Yi": 4, "Yf": 0.5, "isfloatX": 1, "isfloatY": 0}, (2.5, 4)),
    ("Int", {"Number": "12"}, (12,)),
    ("Int-\U0001f52c", {"Number": "12"}, (12,)),
    ("Float-\U0001f52c", {"Number": "1.5"}, (1.5,)),
    ("DF_Integer", {"Value": 3}, (3,)),
    ("DF_Float", {"Value": 1.5}, (1.5,)),
    ("intToFloat _O", {"int": 3}, (3.0,)),
    ("Logic Boolean", {"boolean_number": 1.0}, (1, 1, 1, 1)),
    ("Logic Boolean", {"boolean_number": 0.0}, (0, 0, 0, 0)),
    ("SDXLResolutionPresets", {"resolution": "Photo (1216x832)", "orientation": "Vertical"}, (832, 1216)),
    ("SDXLResolutionPresets", {"resolution": "Photo (1216x832)", "orientation": "Horizontal"}, (1216, 832)),
    ("SDXLAspectRatio", {"width": 512, "height": 640, "aspectRatio": "3:4  - 896x1152 portrait"}, (896, 1152)),
    ("SDXLAspectRatio", {"width": 512, "height": 640, "aspectRatio": "custom"}, (512, 640)),
    ("Float", {"Number": "1.5"}, (1.5,)),
    ("Evaluate Integers", {"python_expression": "(a + b) / c", "print_to_console": "False", "a": 3, "b": 4, "c": 2},
     (3, 3.5, "3.5")),
    ("Evaluate Floats", {"python_expression": "a * b - c", "print_to_console": "False", "a": 1.5, "b": 2.0, "c": 1.0},
     (2, 2.0, "2.0")),
    ("CR Value", {"value": 2.7}, (2.7, 2, "")),
    ("CR Float To Integer", {"_float": 2.7}, (2, "")),
    ("CR Integer Multiple", {"integer": 3, "multiple": 8.0}, (24, "")),
    ("CR Set Value On Boolean", {"boolean": True, "value_if_true": 2.5, "value_if_false": 1.0}, (2, 2.5, "")),
    ("CR Set Value On Boolean", {"boolean": False, "value_if_true": 2.5, "value_if_false": 1.0}, (1, 1.0, "")),
    ("CR Image Size", {"width": 640, "height": 512, "upscale_factor": 2.0}, (640, 512, 2.0, "")),
    ("CR SDXL Aspect Ratio", {**_PORTRAIT, "swap_dimensions": "Off"}, (896, 1152, 1.5, 2, _LATENT, "")),
    ("CR SDXL Aspect Ratio", {**_RATIO, "aspect_ratio": "custom", "swap_dimensions": "On"},
     (640, 512, 1.5, 2, BlankLatent(640, 512, 2), "")),
    ("CR SD1.5 Aspect Ratio", {**_RATIO, "aspect_ratio": "1:1 square 512x512", "swap_dimensions": "Off"},
     (512, 512, 1.5, 2, BlankLatent(512, 512, 2), "")),
    ("CR SD1.5 Aspect Ratio", {**_RATIO, "aspect_ratio": "custom", "swap_dimensions": "Off"},
     (512, 640, 1.5, 2, BlankLatent(512, 640, 2), "")),
    ("CR Aspect Ratio", {**_PORTRAIT, "swap_dimensions": "Off", "prescale_factor": 0.5},
     (448, 576, 1.5, 0.5, 2, BlankLatent(448, 576, 2), "")),
    ("CR Aspect Ratio", {**_RATIO, "aspect_ratio": "custom", "swap_dimensions": "Off", "prescale_factor": 1.0},
     (512, 640, 1.5, 1.0, 2, BlankLatent(512, 640, 2), "")),
    ("CR Aspect Ratio Social Media",
     {**_RATIO, "aspect_ratio": "Instagram Portrait - 1080x1350", "swap_dimensions": "Off", "prescale_factor": 1.0},
     (1080, 1350, 1.5, 1.0, 2, BlankLatent(1080, 1344, 2), "")),
    ("CR Aspect Ratio Social Media",
     {**_RATIO, "aspect_ratio": "custom", "swap_dimensions": "Off", "prescale_factor": 1.0},
     (512, 640, 1.5, 1.0, 2, BlankLatent(512, 640, 2), "")),
    ("SDXLEmptyLatentSizePicker+",
     {"resolution": "704x1408 (0.5)", "batch_size": 2, "width_override": 0, "height_override": 640},
     (BlankLatent(704, 640, 2), 704, 640)),
    ("EmptyLatentImagePresets", {"dimensions": "768 x 512 (1.5:1)", "invert": True, "batch_size": 2},
     (BlankLatent(512, 768, 2), 512, 768)),
    ("SDXL Resolutions (JPS)", {"resolution": "portrait - 896x1152 (7:9)"}, (896, 1152)),
    ("CM_SDXLResolution", {"resolution": "896x1152"}, (896, 1152)),
    ("LayerUtility: Integer", {"int_value": 3}, (3,)),
    ("LayerUtility: Float", {"float_value": 1.5}, (1.5,)),
    ("LayerUtility: Boolean", {"bool_value": True}, (True,)),
    ("LayerUtility: Seed", {"seed": 5}, (5,)),
    ("LayerUtility: NumberCalculator", {"a": 7, "b": 2, "operator": "/"}, (3, 3.5)),
    ("LayerUtility: BooleanOperator", {"a": 0, "b": 2, "operator": "or"}, (True,)),
    ("LayerUtility: BooleanOperator", {"a": 0, "b": 2, "operator": "not"}, (True,)),
    ("LayerUtility: BooleanOperator", {"a": 1, "b": 1, "operator": "=="}, (True,)),
    ("Primitive integer [Crystools]", {"int": 3}, (3,)),
    ("Primitive float [Crystools]", {"float": 1.5}, (1.5,)),
    ("Primitive boolean [Crystools]", {"boolean": True}, (True,)),
    ("Seed", {"seed": 5}, (5, 5, 5.0, 5)),
    ("Constant Number", {"number_type": "integer", "number": 2.7}, (2, 2.0, 2)),
    ("Constant Number", {"number_type": "bool", "number": 2.7}, (1, 1.0, 1)),
    ("Random Number", {"number_type": "integer", "minimum": 1.0, "maximum": 100.0, "seed": 3}, (31, 31.0, 31)),
    ("Number Operation", {"number_a": 7, "number_b": 2, "operation": "division"}, (3.5, 3.5, 3)),
    ("Number Operation", {"number_a": 7, "number_b": 2, "operation": "greater-than"}, (1, 1.0, 1)),
    ("Number to Int", {"number": 2.7}, (2,)),
    ("Number to Float", {"number": 2}, (2.0,)),
    ("Number to Text", {"number": 2}, ("2",)),
    ("Text to Number", {"text": "2"}, (2,)),
    ("Text to Number", {"text": "2.5"}, (2.5,)),
    ("KSampler Config (rgthree)",
     {"steps_total": 9, "refiner_step": 7, "cfg": 1.5, "sampler_name": "heun", "scheduler": "simple"},
     (9, 7, 1.5, "heun", "simple")),
    ("Input Parameters (Image Saver)",
     {"seed": 5, "steps": 9, "cfg": 1.5, "sampler": "heun", "scheduler": "simple", "denoise": 0.5},
     (5, 9, 1.5, "heun", "simple", 0.5)),
    *(
        (f"{name}{ending}", inputs, outputs)
        for ending in ("", " (Image Saver)")
        for name, inputs, outputs in (
            ("Sampler Selector", {"sampler_name": "heun"}, ("heun", "heun")),
            ("Scheduler Selector", {"scheduler": "karras"}, ("karras", "karras")),
            ("Seed Generator", {"seed": 5}, (5,)),
            ("Int Literal", {"int": 5}, (5,)),
            ("Width/Height Literal", {"int": 5}, (5,)),
            ("Float Literal", {"float": 1.5}, (1.5,)),
            ("Cfg Literal", {"cfg": 1.5}, (1.5,)),
            ("String Literal", {"string": "a"}, ("a",)),
        )
    ),
    ("SamplerSelector", {"sampler": "heun"}, ("heun",)),
    ("SchedulerSelector", {"scheduler": "karras"}, ("karras",)),
    ("ttN seed", {"seed": 5}, (5,)),
    ("ttN int", {"int": 5}, (5, 5.0, "5")),
    ("ttN float", {"float": 1.5}, (1.5, 1, "1.5")),
)  # fmt: skip
CASES = (*TEXT_CASES, *NUMBER_CASES)
#: inputs that change no result, by the reason
INERT: Mapping[str, tuple[tuple[str, str], ...]] = {
    "it is what the server prints": (
        ("SDXLPromptStyler", "log_prompt"),
        ("Debug Number to Console", "label"),
        *(("ttN textDebug", name) for name in ("print_to_console", "console_title", "execute")),
        ("Evaluate Integers", "print_to_console"),
        ("Evaluate Floats", "print_to_console"),
    ),
    "the choice of the seed is made in the editor, or refused": (
        ("ImpactWildcardProcessor", "seed"),
        ("easy wildcards", "seed"),
    ),
    "it has one choice": (("CM_BoolUnaryOperation", "op"),),
    "the editor adds it to the text": (
        ("ImpactWildcardProcessor", "Select to add Wildcard"),
        *(("PromptBuilder //Inspire", name) for name in ("category", "preset")),
        *(("easy wildcards", f"Select to add {what}") for what in ("LoRA", "Wildcard")),
    ),
    "a letter like the others": tuple(
        ("SimpleCalculatorKJ", f"variables.{letter}") for letter in "defghijklmnopqrstuvwxyz"
    ),
    "a text like the others": tuple(("JoinStringMulti", f"string_{place}") for place in range(4, 101)),
}


def result(kind: NodeType, inputs: Mapping[str, Any]) -> Any:
    """The outputs of a node, or its refusal."""
    values = {given.name: inputs.get(given.name, given.default) for given in kind.inputs}
    try:
        return kind.build(values)
    except (NodeUnsupported, ArithmeticError) as problem:
        return str(problem)


def others(given: NodeInput, value: Any) -> Iterator[Any]:
    """Other values of an input."""
    match given.type:
        case "BOOLEAN":
            yield not value
        case "INT" | "FLOAT":
            step = 1 if given.type == "INT" else 0.5
            found = [(value or 0) + step * far for far in (1, -1, 20, -20, 300, -300)]
            yield from (each for each in found if given.least <= each <= given.most)
        case "COMBO":
            yield from given.choices
        case _ if given.type == ANY and not isinstance(value, str):
            yield from ((value or 0) + 1, (value or 0) + 2, (value or 0) - 2, 0)
        case _:
            yield from (f"{value or ''}x", f"{value or ''}1", "custom")


def test_nodes_give_what_their_descriptions_say() -> None:
    wrong = []
    for name, inputs, wanted in CASES:
        found = result(NODE_TYPES[name], inputs)
        if found != wanted or [*map(type, found)] != [*map(type, wanted)]:
            wrong.append((name, inputs, found))
        if len(wanted) != len(NODE_TYPES[name].outputs):
            wrong.append((name, "outputs", len(wanted)))
    assert not wrong, wrong


def test_every_node_has_a_case_and_every_input_acts() -> None:
    inert = {each for rows in INERT.values() for each in rows}
    wrong = []
    for kind in (*PACK_TEXTS, *PACK_NUMBERS):
        cases = [inputs for name, inputs, _ in CASES if name == kind.name]
        acting = {
            given.name
            for inputs in cases
            for given in kind.inputs
            for value in others(given, inputs.get(given.name, given.default))
            if result(kind, {**inputs, given.name: value}) != result(kind, inputs)
        }
        named = {given.name for given in kind.inputs}
        if (left := named - acting - {name for which, name in inert if which == kind.name}) or not cases:
            wrong.append((kind.name, left))
    assert not wrong, wrong
    assert not [each for each in inert if each[1] not in {given.name for given in NODE_TYPES[each[0]].inputs}]


def test_what_a_node_cannot_do_is_refused_by_name() -> None:
    cases = (
        ("JoinStringMulti", {"return_list": True}, "return_list: found true"),
        ("SDXLPromptStyler", {"text_positive": "a", "text_negative": "", "style": "anime"}, "style: found 'anime'"),
        ("ImpactWildcardProcessor", {"wildcard_text": "a {b|c}", "populated_text": "a b"}, "mode: found populate"),
        ("ImpactWildcardProcessor", {"wildcard_text": "a __cats__", "populated_text": ""}, "mode: found populate"),
        ("easy mathInt", {"a": 2, "b": 10**9, "operation": "power"}, "exponent"),
        ("easy mathFloat", {"a": -8.0, "b": 0.5, "operation": "power"}, "no number"),
        ("easy compare", {"a": "x", "b": 2, "comparison": "a < b"}, "a, b: found 'x' and '2'"),
        ("CR SDXL Aspect Ratio", {"aspect_ratio": "square"}, "aspect_ratio: found 'square'"),
        ("easy wildcards", {"text": "a {b|c}"}, "text: found choices"),
        ("easy wildcards", {"text": "a <lora:b:1>"}, "text: found a LoRA"),
        ("easy wildcards", {"text": "a\nb", "multiline_mode": True}, "multiline_mode: found true"),
        ("AspectSize", {"model_type": "SD", "aspect_ratio_width": 3, "aspect_ratio_height": 2}, "sides are rounded"),
        ("AspectSize", {"model_type": "Cascade"}, "model_type: found Cascade"),
        ("SeargeIntegerMath", {"op": "a / b", "a": 1, "b": 2, "c": 3}, "op: found '/' in it"),
        ("SDXLResolutionPresets", {"resolution": "8x8", "orientation": "Tilted"}, "expected a name with"),
        ("Int", {"Number": "many"}, "Number: found 'many'"),
        ("CM_FloatUnaryOperation", {"op": "Sqrt", "a": -1.0}, "a: found -1, expected a number that Sqrt has"),
        ("CR String To Number", {"text": "1.5", "round_integer": "up"}, "round_integer: found 'up'"),
        ("Number Input Condition", {"number_a": 1, "number_b": 2, "comparison": "if A prime"}, "comparison: found"),
        ("Random Number", {"number_type": "float", "minimum": 2.0, "maximum": 1.0}, "minimum, maximum"),
        ("String Replace (mtb)", {"string": "aa", "old": "(a+)+", "new": "", "use_regex": True}, "regex_pattern"),
    )
    for name, inputs, message in cases:
        found = result(NODE_TYPES[name], inputs)
        assert isinstance(found, str), name
        assert message in found, name


def routed(graph: Graph, end: str, slot: int = 0) -> Any:
    """What an output leads to: a link, or a value; its own link if it is not known."""
    graph = {**graph, "end": node("Any Switch (rgthree)", any_01=[end, slot])}
    return evaluated(graph, nodes_in_order(KnownGraph(graph, NAMES), ["end"]))["end"]["inputs"]["any_01"]


#: what switches are used with: two inputs, and which of them is passed on
SWITCHED: tuple[tuple[str, Mapping[str, Any], str, str, str], ...] = (
    ("BooleanSwitchNode", {"state": False}, "on_true", "on_false", "on_false"),
    ("easy ifElse", {"boolean": True}, "on_true", "on_false", "on_true"),
    ("easy imageSwitch", {"boolean": True}, "image_a", "image_b", "image_a"),
    ("ImpactConditionalBranch", {"cond": False}, "tt_value", "ff_value", "ff_value"),
    ("LayerUtility: If ", {"if_condition": True}, "when_TRUE", "when_FALSE", "when_TRUE"),
    ("Text Input Switch", {"boolean": False}, "text_a", "text_b", "text_b"),
    ("Image Input Switch", {"boolean": True}, "image_a", "image_b", "image_a"),
    ("Switch image [Crystools]", {"boolean": False}, "on_true", "on_false", "on_false"),
    ("CR Image Input Switch", {"Input": 2}, "image1", "image2", "image2"),
    ("CR Text Input Switch", {"Input": 1}, "text1", "text2", "text1"),
    ("CR VAE Input Switch", {"Input": 1}, "VAE1", "VAE2", "VAE1"),
    ("CR Image Input Switch (4 way)", {"Input": 4}, "image1", "image4", "image4"),
    ("easy anythingIndexSwitch", {"index": 1}, "value0", "value1", "value1"),
    ("easy textSwitch", {"input": 2}, "text1", "text2", "text2"),
    ("ImpactSwitch", {"select": 2}, "input1", "input2", "input2"),
    ("LayerUtility: SwitchCase",
     {"switch_condition": "b", "case_1": "a", "case_2": "b", "case_3": "b", "input_default": ["input_1", 0]},
     "input_1", "input_2", "input_2"),
    ("LayerUtility: SwitchCase",
     {"switch_condition": "x", "case_1": "a", "case_2": "b", "case_3": "c"}, "input_1", "input_default",
     "input_default"),
    ("ImageMaskSwitch", {"select": 2}, "images1", "images2_opt", "images2_opt"),
    ("ImpactInversedSwitch", {"select": 1}, "input", "", "input"),
    ("If ANY execute A else B", {"ANY": ""}, "IF_TRUE", "IF_FALSE", "IF_FALSE"),
    ("SimpleCondition+", {"evaluate": 2}, "on_true", "on_false", "on_true"),
    *((name, {}, source, "", source) for name, source in (
        ("easy showAnything", "anything"), ("easy cleanGpuUsed", "anything"), ("easy clearCacheAll", "anything"),
        ("PlaySound|pysssss", "any"), ("SystemNotification|pysssss", "any"), ("LayerUtility: AnyRerouter", "any"),
        ("LayerUtility: PurgeVRAM V2", "anything"), ("DebugPrint", "ANY"), ("Combo Clone", "combo"),
        ("ImagePass", "image"), ("Sleep", "input"), ("VRAM_Debug", "any_input"),
        ("ImpactExecutionOrderController", "signal"), ("VRAMCleanup", "anything"), ("RAMCleanup", "anything"),
        ("UnloadAllModels", "value"), ("Free_Video_Memory", "images"), ("FreeMemoryImage", "image"),
    )),
)  # fmt: skip


def test_switches_pass_on_what_they_choose() -> None:
    for name, settings, one, other, chosen in SWITCHED:
        kind = {"vae_name": "x"} if "VAE" in name else {"image": "x"}
        images = {each: node("VAELoader" if "vae_name" in kind else "LoadImage", **kind) for each in (one, other)}
        links = {each: [each, 0] for each in (one, other) if each}
        assert routed({**images, "switch": node(name, **settings, **links)}, "switch") == [chosen, 0], name


def test_switches_give_their_place_and_nothing_where_nothing_is_linked() -> None:
    image = {"a": node("LoadImage", image="a")}
    switch = {**image, "s": node("ImpactSwitch", select=2, input2=["a", 0])}
    assert [routed(switch, "s", slot) for slot in (1, 2)] == ["input2", 2]
    ways = {**image, "s": node("Switch from any [Crystools]", any=["a", 0], boolean=False)}
    assert [routed(ways, "s", slot) for slot in (0, 1)] == [["s", 0], ["a", 0]]
    latents = {each: node("EmptyLatentImage", width=64, height=64, batch_size=1) for each in "ab"}
    chosen = node("Latent Switch (JPS)", select=5, latent_1=["a", 0], latent_5=["b", 0])
    assert routed({**latents, "s": chosen}, "s") == ["b", 0]
    texts = {**basic(), "s": node("Conditioning Switch (JPS)", select=1, con_1=["negative", 0], con_2=["positive", 0])}
    assert routed(texts, "s") == ["negative", 0]
    inverse = {**image, "s": node("ImpactInversedSwitch", input=["a", 0], select=3)}
    assert [routed(inverse, "s", slot) for slot in (0, 2)] == [["s", 0], ["a", 0]], "nothing but the third output"
    graph = {**basic(latent_image=["s", 0]), "s": node("easy ifElse", boolean=True, on_false=["blank", 0])}
    with pytest.raises(WorkflowRejected, match=r"node s \(easy ifElse\): .*its choice is not known"):
        outputs_of(graph, NAMES)
    later = {**basic(), "s": node("If ANY execute A else B", ANY=["blank", 0], IF_TRUE=["blank", 0])}
    later["sampler"]["inputs"]["latent_image"] = ["s", 0]
    with pytest.raises(WorkflowRejected, match="its choice is not known"):
        outputs_of(later, NAMES)


def piped(*nodes: tuple[str, Graph]) -> list[Any]:
    """The request of a workflow with a pipe from its checkpoint to its sampler, and what it is without one."""
    graph = basic()
    plain = basic()
    graph |= dict(nodes)
    inputs = graph["sampler"]["inputs"]
    inputs |= {"model": ["out", 0], "positive": ["out", 3], "negative": ["out", 4]}
    return [
        [requests_of(output, NAMES, lambda name: pytest.fail(f"reads {name}")) for output in outputs_of(each, NAMES)]
        for each in (graph, plain)
    ]


PARTS = {"model": ["model", 0], "clip": ["model", 1], "vae": ["model", 2]}
TEXTS = {"positive": ["positive", 0], "negative": ["negative", 0]}


@pytest.mark.parametrize(
    "nodes",
    [
        {"in": node("ToBasicPipe", **PARTS, **TEXTS), "out": node("FromBasicPipe", basic_pipe=["in", 0])},
        {
            "in": node("ToBasicPipe", **PARTS, positive=["negative", 0], negative=["negative", 0]),
            "edit": node("EditBasicPipe", basic_pipe=["in", 0], positive=["positive", 0]),
            "out": node("FromBasicPipe", basic_pipe=["edit", 0]),
        },
    ],
    ids=["plain", "edited"],
)
def test_pipes_carry_links(nodes: Graph) -> None:
    found, wanted = piped(*nodes.items())
    assert found == wanted


def test_contexts_are_switched_merged_and_replaced() -> None:
    first = node("Context (rgthree)", **PARTS, seed=7)
    second = node("Context (rgthree)", base_ctx=["first", 0], **TEXTS, seed=8)
    empty = node("Context (rgthree)")
    graph: Graph = {**basic(), "first": first, "second": second, "empty": empty}
    graph["switch"] = node("Context Switch (rgthree)", ctx_01=["empty", 0], ctx_02=["second", 0], ctx_03=["first", 0])
    assert routed(graph, "switch", 1) == ["model", 0]
    assert routed(graph, "switch", 4) == ["positive", 0]
    assert routed(graph, "switch", 8) == 8
    graph["merge"] = node("Context Merge (rgthree)", ctx_01=["second", 0], ctx_02=["first", 0])
    assert routed(graph, "merge", 5) == ["negative", 0]
    assert routed(graph, "merge", 8) == 7
    graph["big"] = node("Context Big (rgthree)", base_ctx=["second", 0], cfg=2.5)
    assert [routed(graph, "big", slot) for slot in (8, 11)] == [8, 2.5]
    module = {"model": ["model", 0], "pos": ["positive", 0], "seed": 9}
    graph |= {"module": node("CR Module Pipe Loader", **module), "empty module": node("CR Module Pipe Loader", seed=1)}
    graph["chosen"] = node("CR Pipe Switch", Input=2, pipe1=["empty module", 0], pipe2=["module", 0])
    graph["parts"] = node("CR Module Input", pipe=["chosen", 0])
    assert [routed(graph, "parts", slot) for slot in (1, 2, 9)] == [["model", 0], ["positive", 0], 9]
    graph["changed"] = node("CR Module Output", pipe=["module", 0], pos=["negative", 0])
    graph["last"] = node("CR Module Input", pipe=["changed", 0])
    assert [routed(graph, "last", slot) for slot in (1, 2)] == [["model", 0], ["negative", 0]]
    graph |= {"bus": node("Bus Node", **PARTS), "next": node("Bus Node", bus=["bus", 0], **TEXTS)}
    assert [routed(graph, "next", slot) for slot in (1, 4)] == [["model", 0], ["positive", 0]]
    easy = {"pos": ["positive", 0], "neg": ["negative", 0], "model": ["model", 0]}
    graph |= {"in": node("easy pipeIn", **easy), "out": node("easy pipeOut", pipe=["in", 0])}
    assert [routed(graph, "out", slot) for slot in (1, 2, 3)] == [["model", 0], ["positive", 0], ["negative", 0]]
    assert routed(graph, "out", 4) == ["out", 4], "nothing is linked"


def test_a_camera_is_told_in_words() -> None:
    for (turn, height, zoom), words in {
        (0, 0, 5.0): "<sks> front view eye-level shot medium shot",
        (23, 15, 2.0): "<sks> front-right quarter view elevated shot medium shot",
        (315, -16, 6.0): "<sks> front-left quarter view low-angle shot close-up",
        (360, 45, 1.9): "<sks> front view high-angle shot wide shot",
        (180, 44, 1.9): "<sks> back view elevated shot wide shot",
    }.items():
        settings = {"horizontal_angle": turn, "vertical_angle": height, "zoom": zoom}
        camera = node("QwenMultiangleCameraNode", **settings, image=["a", 0], camera_view="")
        assert routed({"a": node("LoadImage", image="a"), "camera": camera}, "camera") == words


def test_each_kind_of_switch_is_tried() -> None:
    """Kinds of one family that differ in their types alone stand for each other."""
    tried = {name for name, *_ in SWITCHED}
    families = (
        "Input Switch",
        "[Crystools]",
        "IndexSwitch",
        "Pipe",
        "pipe",
        "Context",
        "LatentSwitch",
        "ModelPass",
        "Camera",
        "VHS_VideoInfo",
        "FreeMemory",
        "CR Module",
        "Bus Node",
        "Switch (JPS)",
    )
    assert not [kind.name for kind in PACK_SWITCHES if kind.name not in tried and
                not any(part in kind.name for part in families)]  # fmt: skip
